"""The panel as a person sees it: real TensorBoard, real browser, its real content-security policy."""

from playwright.sync_api import expect


def texts(frame, part):
    """Return layer and type of the issues in one list."""
    items = frame.locator(f"[data-part={part}] .issue")
    return [
        (
            item.get_attribute("data-type"),
            item.locator(".layer").get_attribute("title"),
            item.locator(".message").text_content(),
        )
        for item in items.all()
    ]


def test_the_tab_shows_the_verdict_and_the_issues_that_were_written(address, open_panel, logs):
    """The worst comes first, with what it explains behind it; healed ones stand apart."""
    page, frame = open_panel(address, "&p.gradflow.run=sick", host=True)
    expect(page.get_by_role("tab", name="GradFlow")).to_be_visible()
    expect(frame.locator("[data-part=run] option")).to_have_count(7)
    verdict = frame.locator("[data-part=verdict]")
    expect(verdict.locator("h1")).to_have_text("1 problem")
    expect(verdict).to_contain_text("EXPLODING in transformer.h.7.mlp since step 1320")
    explosion, dead, healed = logs.sick_issues(2400)
    assert texts(frame, "open") == [(str(item.issue_type), item.layer, item.message) for item in (explosion, dead)]
    assert texts(frame, "past") == [(str(healed.issue_type), healed.layer, healed.message)]
    expect(frame.locator("[data-part=note]")).to_contain_text("steps per column: extreme shown")


def test_a_healthy_run_is_called_healthy(address, open_panel):
    """Choosing another run in the panel changes everything, and the address."""
    page, frame = open_panel(address, "&p.gradflow.run=sick", host=True)
    frame.locator("[data-part=run]").select_option("healthy")
    expect(frame.locator("[data-part=verdict] h1")).to_have_text("Healthy")
    expect(frame.locator("[data-part=open]")).to_be_hidden()
    page.wait_for_function("location.hash.includes('p.gradflow.run=healthy')")


def test_hovering_the_map_shows_the_value_that_was_written(address, open_panel):
    """Site "b" lies above "a"; eight steps share the width."""
    page, frame = open_panel(address, "&p.gradflow.run=known")
    plot = frame.locator("[data-part=map]")
    box = plot.bounding_box()
    for site, height in (("a", 0.75), ("b", 0.25)):
        for step in (1, 6, 8):
            plot.hover(position={"x": box["width"] * (step - 0.5) / 8, "y": box["height"] * height})
            tip = frame.locator(".tip")
            expect(tip.locator(".l")).to_have_text(site)
            expect(tip.locator(".v")).to_have_text(str(step + (100 if site == "b" else 0) + 0.125))
            expect(tip).to_contain_text(f"gain, step {step}")
    page.mouse.move(5, 5)
    expect(frame.locator(".tip")).to_be_hidden()


def test_an_issue_moves_the_step_and_pins_its_layer_and_a_link_opens_the_same_view(address, open_panel):
    """One click answers where and since when, with the metric that shows it; all of it lives in the address."""
    page, frame = open_panel(address, "&p.gradflow.run=sick")
    frame.locator("[data-part=open] summary", has_text="also seen: DEAD").click()
    frame.locator("[data-part=open] .issue[data-type=DEAD]").click()
    page.wait_for_function("location.hash.includes('activation.dead_share')")
    link = page.evaluate("location.hash").removeprefix("#")
    _, again = open_panel(address, link)
    for view in (frame, again):
        expect(view.locator("[data-part=step]")).to_have_text("1\u202f680")
        expect(view.locator("[data-part=metric]")).to_have_value("activation.dead_share")
        expect(view.locator("[data-part=names] .pinned")).to_have_text("transformer.h.3.mlp.act")


def test_hostile_names_are_shown_as_text(address, open_panel, logs):
    """A layer's name is never markup, wherever it appears."""
    page, frame = open_panel(address, "&p.gradflow.run=%C3%A9moji%20%F0%9F%94%A5%20%E5%90%8D%E5%89%8D")
    assert {layer for _, layer, _ in texts(frame, "open")} == set(logs.HOSTILE)
    assert {message for _, _, message in texts(frame, "open")} == set(logs.HOSTILE)
    names = frame.locator("[data-part=names] .name")
    assert {button.get_attribute("title") for button in names.all()} == set(logs.HOSTILE)
    frame.locator("[data-part=open] .issue").first.click()
    plot = frame.locator("[data-part=map]")
    plot.hover(position={"x": 200, "y": 5})
    expect(frame.locator(".tip .l")).to_have_text(logs.HOSTILE[-1])
    assert frame.locator("img, script:not([src]) + img").count() == 0
    assert "owned" not in page.title()
    assert frame.locator("body").evaluate("() => document.title") == "GradFlow"
    overflow = frame.locator("body").evaluate("() => document.documentElement.scrollWidth - window.innerWidth")
    assert overflow <= 0


def test_the_theme_follows_the_switch_of_tensorboard(address, open_panel):
    """The frame is painted in both, and follows without a reload."""
    page, frame = open_panel(address, "&p.gradflow.run=sick", host=True)
    ground = "() => getComputedStyle(document.body).backgroundColor"
    light = frame.locator("body").evaluate(ground)
    page.evaluate("document.body.classList.toggle('dark-mode')")
    expect(frame.locator("html")).to_have_class("dark")
    assert frame.locator("body").evaluate(ground) not in {light, "rgba(0, 0, 0, 0)"}
    page.evaluate("document.body.classList.toggle('dark-mode')")
    expect(frame.locator("html")).not_to_have_class("dark")


def test_any_metric_can_be_put_on_the_map(address, open_panel):
    """The profile and the pinned lines follow."""
    _, frame = open_panel(address, "&p.gradflow.run=sick")
    frame.locator("[data-part=metric]").select_option("block.gradient_norm")
    expect(frame.get_by_role("heading", name="Pinned layers")).to_have_text(
        "Pinned layers: gradient norm at the block's output"
    )


def test_dragging_zooms_and_the_server_decimates_anew(address, open_panel):
    """A fifth of the steps fits at full resolution, also for who opens the link; the way back asks for nothing twice."""
    page, frame = open_panel(address, "&p.gradflow.run=sick")
    note = frame.locator("[data-part=note]")
    expect(note).to_contain_text("steps per column")
    box = frame.locator("[data-part=map]").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 60, steps=3)
    page.mouse.up()
    expect(note).to_have_text("every reading shown")
    page.wait_for_function("location.hash.includes('p.gradflow.zoom=')")
    _, again = open_panel(address, page.evaluate("location.hash").removeprefix("#"))
    expect(again.locator("[data-part=note]")).to_have_text("every reading shown")
    asked = []
    page.on("request", lambda request: asked.append(request.url) if "/series?" in request.url else None)
    frame.locator("[data-part=reset]").click()
    expect(note).to_contain_text("steps per column")
    expect(frame.locator("[data-part=reset]")).to_be_hidden()
    assert asked == []


def test_the_panel_fits_a_narrow_window(address, open_panel):
    """Nothing hangs over the edge on a small screen."""
    _, frame = open_panel(address, "&p.gradflow.run=sick", width=640)
    overflow = frame.locator("body").evaluate("() => document.documentElement.scrollWidth - window.innerWidth")
    assert overflow <= 0


WATCH = """() => {
    const all = selector => [...document.querySelectorAll(selector)];
    const parts = ['[data-part=map] canvas', '.lines canvas', '[data-part=verdict] h1', '[data-part=names] .name',
        '[data-part=health] tbody tr', '.legend'];
    window.kept = parts.flatMap(all);
    window.blank = 0;
    const look = () => {
        for (const canvas of all('[data-part=map] canvas, .lines canvas')) {
            const pixel = canvas.width && canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.some(v => v);
            if (!pixel) window.blank++;
        }
        requestAnimationFrame(look);
    };
    look();
    return window.kept.length;
}"""


def polls(page, seconds):
    """Let the page's clock run, as fast as its requests are answered; return the plugin's requests in that time."""
    asked = []
    page.on("request", lambda request: asked.append(request) if "/plugin/gradflow/" in request.url else None)
    for _ in range(seconds):
        page.clock.run_for(1000)
        page.wait_for_timeout(50)
        for request in asked:
            request.response().finished()
    return [request for request in asked if "static" not in request.url]


def test_new_steps_appear_by_themselves(tmp_path, logs, tensorboard, open_panel):
    """From how-to page to verdict without touching the page, without a blank frame, and only while somebody looks."""
    (tmp_path / "runs" / "live").mkdir(parents=True)
    with tensorboard(f"--logdir={tmp_path / 'runs'}", "--reload_interval=1") as address:
        page, frame = open_panel(address, host=True, clock=True)
        step = frame.locator("[data-part=step]")

        def wait_for_step(text):
            while not step.count() or step.text_content() != text:
                page.clock.run_for(1000)
                page.wait_for_timeout(100)

        def arrive(records, start):
            """Let records lie there whole at once, so that no reader finds a part of them."""
            logs.write_run(tmp_path / "aside", records, start=start)
            for file in list((tmp_path / "aside").iterdir()):
                file.rename(tmp_path / "runs" / "live" / file.name)

        expect(frame.locator("[data-part=empty]")).to_contain_text("from gradflow_export import Exporter")
        arrive(logs.plain_records(range(1, 21)), 0)
        wait_for_step("20")
        frame.locator("[data-part=names] .name").first.click()
        expect(frame.locator(".lines canvas")).to_have_count(2)
        kept = frame.locator("body").evaluate(WATCH)
        arrive(logs.plain_records(range(21, 41)), 60)
        wait_for_step("40")
        expect(frame.locator("[data-part=table-note]")).to_have_text("at step 40")
        assert frame.locator("body").evaluate(
            "() => [window.kept.filter(e => e.isConnected).length, window.blank]"
        ) == [kept, 0]
        page.evaluate("location.hash = 'scalars'")
        expect(page.locator("iframe")).to_be_hidden()
        assert polls(page, 13) == []
        page.evaluate("location.hash = 'gradflow'")
        expect(page.locator("iframe")).to_be_visible()
        asked = polls(page, 9)
        assert {request.url.rpartition("/")[2] for request in asked} == {"runs"}
        assert all(len(request.response().body()) < 400 for request in asked)
        page.close()


def test_the_slow_loader_and_a_path_prefix_give_the_same(logdir, versions_in, tensorboard, open_panel):
    """Python's reader instead of the Rust server, named log directories, and all addresses below a prefix."""
    flags = (f"--logdir_spec=mine:{logdir / 'sick'}", "--load_fast=false", "--path_prefix=/deep/below")
    with tensorboard(*flags, holds=versions_in(logdir / "sick")) as address:
        page, frame = open_panel(address, host=True)
        expect(frame.locator("[data-part=verdict] h1")).to_have_text("1 problem")
        expect(frame.locator("[data-part=run]")).to_have_value("mine/.")
        expect(frame.locator("[data-part=run] option")).to_have_text("mine")
        expect(frame.locator("[data-part=note]")).to_contain_text("steps per column")
        for part, count in ((".lines canvas", 3), ("[data-part=lanes] button", 3), ("[data-part=ridges] g", 24)):
            expect(frame.locator(part)).to_have_count(count)
        expect(frame.locator("[data-part=course]")).to_contain_text("loss")
        expect(frame.locator("[data-part=health] tbody tr").first).to_contain_text("EXPLODING")
        frame.locator("[data-part=map]").hover()
        for _ in range(3):
            page.mouse.wheel(0, -400)
        expect(frame.locator("[data-part=note]")).to_have_text("every reading shown")
        frame.locator("[data-part=metric]").select_option("activation.dead_share")
        expect(frame.locator("[data-part=names] .name")).to_have_count(11)
        frame.locator("[data-part=metric]").select_option("runtime.rss")
        expect(frame.locator("[data-part=lesson]")).to_contain_text("Not recorded in this run: resident memory")
        page.close()


def test_the_page_is_painted_whole_in_both_themes(address, open_panel):
    """A picture of maps, lines and table is no blank page."""
    page, frame = open_panel(address, "&p.gradflow.run=sick", height=1790, host=True)
    frame.locator("[data-part=open] .issue").first.click()
    expect(frame.locator("[data-part=step]")).to_have_text("1\u202f320")
    expect(frame.locator(".lines canvas")).to_have_count(3)
    expect(frame.locator("[data-part=table-note]")).to_have_text("at step 1\u202f320")
    page.mouse.move(640, 60)
    for theme in ("dark", "light"):
        page.evaluate("dark => document.body.classList.toggle('dark-mode', dark)", theme == "dark")
        expect(frame.locator("html")).to_have_class("dark" if theme == "dark" else "")
        # Two frames, however long a poll of TensorBoard's takes meanwhile.
        frame.locator("body").evaluate(
            "() => new Promise(go => requestAnimationFrame(() => requestAnimationFrame(go)))"
        )
        assert len(page.screenshot()) > 40_000
