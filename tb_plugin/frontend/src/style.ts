// The panel's look. Both themes are stated as variables; canvases read the same variables.

export const STYLE = `
:root { --bg:#f4f5f7; --card:#fff; --text:#1c2127; --dim:#5f6873; --faint:#8b939d; --line:#e2e5e9; --hover:#f0f2f5;
  --accent:#1560c8; --good:#1a7f4b; --warn:#a85b00; --bad:#c02a34; --good-bg:#e6f4ec; --warn-bg:#fdf1de; --bad-bg:#fcebec;
  --missing:#b4bac2; --grid:#eceef1; --cursor:#1c2127; --shadow:0 1px 2px rgb(20 30 45 / 6%), 0 1px 6px rgb(20 30 45 / 4%); color-scheme:light }
:root.dark { --bg:#303030; --card:#3a3b3d; --text:#eef0f2; --dim:#b3b9c1; --faint:#8f969e; --line:#4c4e52; --hover:#444649;
  --accent:#82b4ff; --good:#74d3a0; --warn:#f5bd66; --bad:#ff9298; --good-bg:#2c4638; --warn-bg:#4b3f2a; --bad-bg:#53343a;
  --missing:#6e737a; --grid:#46484b; --cursor:#fff; --shadow:0 1px 2px rgb(0 0 0 / 25%); color-scheme:dark }
* { box-sizing:border-box }
body { margin:0; background:var(--bg); color:var(--text); font:14px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;
  font-variant-numeric:tabular-nums; -webkit-font-smoothing:antialiased }
button,select,input { font:inherit; color:inherit }
select,.btn { height:32px; background:var(--card); border:1px solid var(--line); border-radius:6px; padding:0 10px; cursor:pointer; max-width:100% }
select:hover,.btn:hover { border-color:var(--faint) }
:focus-visible { outline:2px solid var(--accent); outline-offset:1px }
.mono { font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace; font-size:.92em }
.page { max-width:1680px; margin:0 auto; padding:0 20px 28px; display:grid; gap:14px; grid-template-columns:minmax(0,1fr) }
header { position:sticky; top:0; z-index:5; background:var(--bg); display:flex; align-items:center; gap:14px; padding:12px 0 0; min-height:56px; flex-wrap:wrap }
header label { display:flex; align-items:center; gap:8px; color:var(--dim); font-size:13px }
header .run { min-width:150px; max-width:280px; font-weight:600; color:var(--text) }
.facts { color:var(--dim); font-size:13px; white-space:nowrap; overflow:hidden; text-overflow:ellipsis; flex:1; min-width:120px }
.stepper { display:flex; align-items:center; gap:8px; font-size:13px; color:var(--dim) }
.stepper input { width:200px; accent-color:var(--accent) }
.stepper output { min-width:66px; color:var(--text); font-weight:600; text-align:right }
.icon { width:32px; padding:0; display:inline-grid; place-items:center }
.live { display:flex; align-items:center; gap:7px; font-size:13px }
.live i { width:8px; height:8px; border-radius:50%; background:var(--faint) }
.live[aria-pressed=true] i { background:var(--good) }
.card { background:var(--card); border:1px solid var(--line); border-radius:10px; box-shadow:var(--shadow); min-width:0 }
.verdict { display:flex; align-items:center; gap:16px; padding:14px 18px; min-height:72px; border-left:5px solid var(--faint) }
.verdict .mark { width:34px; height:34px; border-radius:50%; display:grid; place-items:center; font-weight:700; font-size:18px; flex:none; background:var(--hover); color:var(--dim) }
.verdict h1 { font-size:19px; line-height:1.25; margin:0; font-weight:650 }
.verdict p { margin:2px 0 0; color:var(--dim); overflow-wrap:anywhere; max-height:4.4em; overflow:auto }
.tone-good { border-left-color:var(--good) } .tone-good .mark { background:var(--good-bg); color:var(--good) }
.tone-warn { border-left-color:var(--warn) } .tone-warn .mark { background:var(--warn-bg); color:var(--warn) }
.tone-bad { border-left-color:var(--bad) } .tone-bad .mark { background:var(--bad-bg); color:var(--bad) }
.issues { display:grid; gap:10px; grid-template-columns:repeat(auto-fill,minmax(min(430px,100%),1fr)); list-style:none; margin:0; padding:0 }
.issue { width:100%; height:100%; text-align:left; cursor:pointer; padding:11px 14px; display:grid; gap:3px; align-content:start; font-size:13.5px }
.issue:hover { background:var(--hover) }
.issue .top { display:flex; gap:9px; align-items:baseline; min-width:0 }
.issue .layer { font-weight:600; overflow:hidden; text-overflow:ellipsis; white-space:nowrap; min-width:0; flex:1 }
.issue .since { color:var(--dim); white-space:nowrap; font-size:12.5px }
.issue .advice { color:var(--dim) } .issue .message,.issue .advice { overflow-wrap:anywhere }
.badge { font-size:11px; font-weight:700; letter-spacing:.035em; padding:1px 7px; border-radius:4px; background:var(--hover); color:var(--dim); white-space:nowrap }
.sev-CRITICAL,.sev-HIGH { background:var(--bad-bg); color:var(--bad) } .sev-MEDIUM,.sev-LOW { background:var(--warn-bg); color:var(--warn) }
.past .badge { background:var(--hover); color:var(--dim) }
.strip { display:grid; grid-template-columns:190px minmax(0,1fr) 250px; column-gap:10px; align-items:center; padding:10px 16px }
.strip h2 { margin:0; font-size:14.5px; font-weight:650 } .strip .steps { display:flex; gap:8px; align-items:center; font-size:12.5px; color:var(--dim) } .strip .steps .btn { height:28px; font-size:13px }
.strip .btn:disabled { opacity:.45; cursor:default }
.lanes { position:relative; background:var(--grid); border-radius:4px; overflow:hidden }
.lanes button { all:unset; box-sizing:border-box; position:absolute; height:20px; line-height:17px; padding:0 6px; overflow:hidden; white-space:nowrap; text-overflow:ellipsis; cursor:pointer; font-size:11.5px; border:1px solid; border-left-width:4px; border-radius:3px; min-width:14px }
.lanes button.past { border-style:dashed; border-left-style:solid } .lanes button:focus-visible,.lanes button.chosen { outline:2px solid var(--accent); outline-offset:-2px }
.lanes .sev-CRITICAL,.lanes .sev-HIGH { background:var(--bad-bg); color:var(--bad) } .lanes .sev-MEDIUM,.lanes .sev-LOW { background:var(--warn-bg); color:var(--warn) } .lanes .sev-INFO { background:var(--hover); color:var(--dim) }
details summary { cursor:pointer; color:var(--dim); font-size:13px; padding:2px 0 6px; width:max-content }
.bar { display:flex; align-items:center; gap:10px; padding:11px 16px 7px; min-height:50px; flex-wrap:wrap }
.bar h2 { margin:0; font-size:14.5px; font-weight:650 }
.bar select { height:28px; font-size:13px; padding:0 6px }
.bar .note { flex:none; color:var(--dim); font-size:12.5px; margin-left:auto; text-align:right }
.formula { color:var(--faint); font-size:12.5px; overflow:hidden; text-overflow:ellipsis; white-space:nowrap; min-width:0; flex:1 1 60px }
.map { display:grid; align-content:start; grid-template-columns:190px minmax(0,1fr) 250px; column-gap:10px; padding:0 16px 4px; position:relative }
.names { position:relative; overflow:hidden; font-size:11.5px }
.names button { all:unset; box-sizing:border-box; position:absolute; right:0; max-width:100%; height:14px; line-height:14px; padding:0 4px; overflow:hidden; text-overflow:ellipsis; white-space:nowrap; cursor:pointer; color:var(--dim); border-radius:3px; direction:ltr }
.names button:hover { color:var(--text); background:var(--hover) } .names button:focus-visible { outline:2px solid var(--accent) }
.names button.pinned { color:var(--text); font-weight:650 }
.names i { display:inline-block; width:8px; height:8px; border-radius:2px; margin-right:5px }
.plot { position:relative; cursor:crosshair; touch-action:none } .plot canvas { display:block; border-radius:3px }
.overlay { position:absolute; inset:0; pointer-events:none }
.vline { position:absolute; top:0; bottom:0; width:0; border-left:1.5px solid var(--cursor); box-shadow:0 0 0 .5px var(--card) }
.vline.ghost { border-left-style:dashed; opacity:.6 }
.hline { position:absolute; left:0; right:0; border-top:1px solid var(--cursor); opacity:.5 }
.band { position:absolute; top:0; bottom:0; background:var(--accent); opacity:.22 }
.pinrow { position:absolute; left:0; right:0; border:1.5px solid; border-left-width:4px; border-radius:2px; box-shadow:0 0 0 1px rgb(255 255 255 / 60%) }
.axis { font-size:11.5px; color:var(--dim); height:42px; position:relative; min-width:0 } .axis p { position:absolute; top:21px; left:0; margin:0; max-width:100%; overflow:hidden; text-overflow:ellipsis; white-space:nowrap } .axis span { position:absolute; top:5px; transform:translateX(-50%); white-space:nowrap }
.axis span::before { content:""; position:absolute; left:50%; top:-5px; height:4px; border-left:1px solid var(--faint) }
.legend { display:flex; gap:16px; align-items:center; flex-wrap:wrap; padding:4px 16px 13px; font-size:12px; color:var(--dim); min-height:44px }
.legend .ramp { display:grid; grid-template-columns:auto auto auto; gap:8px; align-items:center } .legend canvas { display:block; border-radius:2px }
.legend .key { display:flex; gap:6px; align-items:center } .legend .key i { width:14px; height:12px; border-radius:2px; display:block }
.hatch { background:repeating-linear-gradient(135deg,#0c0c0e 0 3px,#fafafa 3px 4.5px) }
.lines { display:grid; gap:14px; grid-template-columns:repeat(auto-fit,minmax(min(320px,100%),1fr)) }
@media (max-width:1000px) { .strip { grid-template-columns:150px minmax(0,1fr) } .strip .steps { grid-column:2 } .map { grid-template-columns:150px minmax(0,1fr) } .map .profile,.map .caption { display:none } }
.line { padding-bottom:8px } .line .bar { padding:9px 12px 3px; gap:7px; min-height:42px } .line .chart { height:210px; margin:0 6px; position:relative }
.line .chart > p { position:absolute; inset:0; display:grid; place-items:center; margin:0 30px; text-align:center; color:var(--dim) }
.toggle { height:26px; padding:0 8px; font-size:12px; color:var(--dim); margin-left:auto } .bar .toggle + .note { margin-left:0 } .toggle[aria-pressed=true] { color:var(--accent); border-color:var(--accent) }
.keys { display:flex; gap:5px 12px; flex-wrap:wrap; padding:2px 14px 0; font-size:12px; min-height:22px } .keys button { all:unset; display:flex; gap:6px; align-items:center; cursor:pointer; max-width:100%; min-width:0 }
.keys .runkey { display:flex; gap:6px; align-items:center } .keys button:hover { text-decoration:line-through } .keys button:focus-visible { outline:2px solid var(--accent) } .keys i { width:12px; height:3px; border-radius:2px; flex:none } .keys span { overflow:hidden; text-overflow:ellipsis; white-space:nowrap; max-width:170px }
.health .scroll { max-height:460px; min-height:120px; overflow:auto; margin:0 16px 12px } .health table { border-collapse:collapse; width:100%; font-size:13px }
.health thead th { position:sticky; top:0; background:var(--card); z-index:1; text-align:right; font-weight:600; padding:4px 8px; white-space:nowrap; color:var(--dim) } .health thead th:nth-child(-n+2) { text-align:left }
.health thead button { all:unset; cursor:pointer } .health thead button:hover { color:var(--text) } .health button:focus-visible { outline:2px solid var(--accent) }
.health [aria-sort=descending] button::after { content:" \\2193" } .health [aria-sort=ascending] button::after { content:" \\2191" } .health [aria-sort=none] button::after { content:" \\2193"; visibility:hidden }
.health tbody tr { border-top:1px solid var(--line); cursor:pointer } .health tbody tr:hover { background:var(--hover) }
.health tbody th { text-align:left; font-weight:400; padding:2px 8px 2px 12px } .health tbody th button { all:unset; cursor:pointer } .health tbody th button[aria-pressed=true] { font-weight:650 }
.health td { padding:2px 8px } .health td:last-child { width:126px } .health .num { text-align:right; white-space:nowrap } .health .none { color:var(--faint) } .health .broken { color:var(--bad); font-weight:650 }
.health .ok { color:var(--good) } .health svg { display:block; margin-left:auto } .health path { fill:none; stroke:var(--accent); stroke-width:1.3 }
.filter { height:28px; font-size:13px; padding:0 8px; border:1px solid var(--line); border-radius:6px; background:var(--card); width:180px } .tools { display:flex; gap:6px } .tools .btn { height:26px; padding:0 8px; font-size:12px; color:var(--dim) }
.ridges { padding:0 16px 10px; min-height:70px } .ridges svg { display:block } .ridges text { font-size:11.5px; fill:var(--dim) } .ridges .bad { fill:var(--bad); font-weight:650 }
.ridges .ridge { fill:color-mix(in srgb,var(--accent) 26%,var(--card)); stroke:var(--accent); stroke-width:1 } .ridges .base { stroke:var(--line) } .ridges g:hover .ridge { fill:color-mix(in srgb,var(--accent) 60%,var(--card)) }
.bar select { max-width:min(380px,100%) }
.bar .download { width:46px; padding:0 4px; color:var(--dim); flex:none; height:26px } .what { width:26px; height:26px; color:var(--dim); font-size:12.5px; flex:none } .line .bar select:not(.download) { min-width:0; flex:0 1 auto } .line .bar h2 { min-width:0; overflow:hidden; text-overflow:ellipsis; white-space:nowrap; flex:0 1 auto } .line .bar { flex-wrap:nowrap }
.info { color:var(--text); padding:20px 24px; max-width:min(560px,92vw); margin:auto } .info::backdrop { background:rgb(0 0 0 / 35%) } .info h2 { margin:0; font-size:17px } .info p { margin:2px 0 12px; color:var(--dim) }
.info dl { display:grid; grid-template-columns:auto 1fr; gap:6px 16px; margin:0 0 16px; font-size:13.5px } .info dt { color:var(--dim) } .info dd { margin:0; overflow-wrap:anywhere }
.tip { position:fixed; z-index:9; pointer-events:none; max-width:380px; background:var(--text); color:var(--card); border-radius:7px; padding:7px 10px; font-size:12.5px; line-height:1.4; box-shadow:0 3px 12px rgb(0 0 0 / 28%); visibility:hidden; overflow-wrap:anywhere }
.tip b { font-weight:650 } .tip .v { font-size:15px; font-weight:650 } .tip div { opacity:.85 } .tip .l,.tip .v { opacity:1 }
.empty { max-width:680px; margin:8vh auto; padding:30px 34px } .empty h1 { margin:0 0 6px; font-size:22px } .empty p { color:var(--dim); margin:0 0 14px }
.empty pre { background:var(--hover); border-radius:8px; padding:14px 16px; margin:0 0 14px; overflow:auto; line-height:1.6 }
.error { padding:10px 16px; color:var(--bad); background:var(--bad-bg); border-color:transparent } .error:empty { display:none }
.offline .live { display:none }
[hidden] { display:none !important }
.u-legend { display:none } .u-select { background:var(--accent); opacity:.2 } .u-cursor-x,.u-cursor-y { border-color:var(--faint) !important }
`;

export function cssVariable(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Colours of pinned layers; Okabe and Ito's, safe for colour-blind eyes, minus black. */
export const PIN_COLOURS: readonly string[] = ["#1f86d1", "#e0661a", "#0f9d76", "#d17fae", "#d99a0b", "#5bb8ea", "#9a78e0", "#8a8a1c"];

export function pinColour(index: number): string {
  return PIN_COLOURS[index % PIN_COLOURS.length] ?? "#1f86d1";
}
