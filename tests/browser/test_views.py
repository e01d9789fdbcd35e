"""The views below the verdict: when, which layer, against which run, how distributed, and how to take it away."""

from playwright.sync_api import expect

SICK = "&p.gradflow.run=sick"


def test_the_strip_shows_every_issue_from_its_first_step_to_its_healing(address, open_panel):
    """Bars lie over the map's steps; the buttons walk from issue to issue, and a click pins the layer."""
    _, frame = open_panel(address, SICK)
    bars = frame.locator("[data-part=lanes] button")
    assert sorted(bar.text_content() for bar in bars.all()) == [
        "DEAD transformer.h.3.mlp.act",
        "EXPLODING transformer.h.7.mlp",
        "NUMERICAL transformer.h.9.attn",
    ]
    step, pinned = frame.locator("[data-part=step]"), frame.locator("[data-part=names] .pinned")
    frame.get_by_label("Previous issue").click()
    expect(step).to_have_text("1\u202f680")
    frame.get_by_label("Previous issue").press("Enter")
    expect(step).to_have_text("1\u202f320")
    expect(pinned.first).to_have_text("transformer.h.7.mlp")
    frame.get_by_label("Previous issue").click()
    expect(step).to_have_text("720")
    expect(frame.get_by_label("Previous issue")).to_be_disabled()
    healed = frame.get_by_label("HIGH NUMERICAL transformer.h.9.attn since step 720, healed at 816")
    plot, bar = frame.locator("[data-part=map]").bounding_box(), healed.bounding_box()
    assert abs(bar["x"] - (plot["x"] + plot["width"] * 719 / 2400)) < 2
    assert abs(bar["width"] - plot["width"] * 97 / 2400) < 2
    frame.get_by_label("CRITICAL EXPLODING").press("Enter")
    expect(step).to_have_text("1\u202f320")
