"""The pages, opened in a real browser: what they show, what they do, and what they must not."""

from __future__ import annotations

import base64
import json
import re
import zipfile
from itertools import pairwise
from pathlib import Path

import polars as pl
import pytest
import yaml
from pages import HOSTILE
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select


def open_page(driver, path: Path, width: int = 1280) -> None:
    driver.get_log("browser"), driver.get_log("performance")  # what earlier pages left
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600},
    )
    driver.get(path.as_uri())


def table(project, kind: str) -> pl.DataFrame:
    return pl.read_parquet(project.folder / f"results/tiny/{kind}.parquet")


def detail(driver) -> str:
    return driver.find_element(By.ID, "detail").text


def first_row(driver) -> list[str]:
    return [
        c.text for c in driver.find_elements(By.CSS_SELECTOR, "#ranking tbody tr:first-child td")
    ]


@pytest.mark.parametrize(
    "name", ["page", "hostile_page", "comparison", "trace", "hostile_trace_page"]
)
def test_a_page_logs_nothing_and_asks_for_nothing_but_itself(chromium, request, name):
    path = request.getfixturevalue(name)
    open_page(chromium, path)
    assert chromium.get_log("browser") == []
    messages = [
        json.loads(entry["message"])["message"] for entry in chromium.get_log("performance")
    ]
    sent = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    asked = [request["request"]["url"] for request in sent]
    assert path.as_uri() in asked
    assert [url for url in asked if url != path.as_uri() and not url.startswith("data:")] == []


def test_the_headline_numbers_are_those_of_the_ablation_table(chromium, project, page):
    open_page(chromium, page)
    rows = table(project, "ablation").filter(pl.col("metric") == "accuracy")
    for task in ("literal", "nonliteral"):
        of_task = rows.filter(pl.col("task") == task)
        shown = chromium.find_element(By.CSS_SELECTOR, f"table.accuracy[data-task={task}]")
        baseline = shown.find_element(By.CLASS_NAME, "baseline").get_attribute("data-value")
        assert float(baseline) == of_task["baseline"][0]
        ks = [
            int(c.text.split()[-1]) for c in shown.find_elements(By.CSS_SELECTOR, "thead .number")
        ]
        assert ks == [1, 2]
        for row in shown.find_elements(By.CSS_SELECTOR, "tbody tr"):
            label = row.find_element(By.TAG_NAME, "th").text
            selector, _, end = label.partition(" ")
            of_row = of_task.filter(
                pl.col("selector") == selector, pl.col("end").eq_missing(end or None)
            )
            for k, cell in zip(ks, row.find_elements(By.TAG_NAME, "td"), strict=True):
                expected = of_row.filter(pl.col("k") == k)["value"].mean()
                assert float(cell.get_attribute("data-value")) == pytest.approx(expected, abs=1e-12)
                assert cell.text.startswith(f"{expected:.2f}")


def test_the_kv_plan_on_the_page_is_that_of_its_table(chromium, project, page):
    open_page(chromium, page)
    shown = chromium.find_elements(By.CSS_SELECTOR, "table.kv[data-task=nonliteral] tbody tr")
    expected = table(project, "kv_check").filter(task="nonliteral").to_dicts()
    assert len(shown) == len(expected) == 3
    for line, row in zip(shown, expected, strict=True):
        values = line.find_elements(By.CSS_SELECTOR, "[data-value]")
        names = ("compressed", "worst", "best", "difference")
        assert [float(v.get_attribute("data-value")) for v in values] == [row[n] for n in names]
        assert f"{row['budget']} % ({row['n_kept']} of 16 groups)" in line.text
        # 16 groups of 2 x 32 x 4 bytes a token, at 1000 tokens.
        assert f"{row['n_compressed'] * 256 * 488 / 2**20:.1f} MiB of 3.9 MiB" in line.text


def test_pointing_at_a_head_shows_its_layer_group_values_intervals_and_ranks(
    chromium, project, page
):
    open_page(chromium, page)
    heads = table(project, "heads").filter(pl.col("layer") == 3, pl.col("head") == 5)
    cell = chromium.find_element(By.CSS_SELECTOR, '#map [data-head="3-5"]')
    before = detail(chromium)
    ActionChains(chromium).move_to_element(cell).perform()
    shown = detail(chromium)
    assert shown != before
    assert "Layer 3, head 5" in shown
    assert f"KV group {heads['kv_group'][0]} " in shown
    for row in heads.iter_rows(named=True):
        line = next(line for line in shown.splitlines() if line.startswith(row["score"]))
        assert f"{row['rank']} of 32" in line
        value = float(line.split()[1].replace("\N{MINUS SIGN}", "-"))
        assert value == pytest.approx(row["value"], rel=0.06, abs=1e-12)
        assert "[" in line and "]" in line


def test_choosing_a_score_changes_colours_table_and_best_heads(chromium, project, page):
    open_page(chromium, page)
    cell = chromium.find_element(By.CSS_SELECTOR, '#map [data-head="2-4"]')
    before = cell.value_of_css_property("background-color"), first_row(chromium)
    assert first_row(chromium)[0] == "2-0"
    Select(chromium.find_element(By.ID, "score")).select_by_visible_text("alpha_spatial")
    assert cell.value_of_css_property("background-color") != before[0]
    best = table(project, "heads").filter(pl.col("score") == "alpha_spatial", pl.col("rank") == 1)
    assert first_row(chromium)[0] == f"{best['layer'][0]}-{best['head'][0]}"
    assert "alpha_spatial" in cell.accessible_name


def test_a_heading_sorts_and_sorts_back(chromium, project, page):
    open_page(chromium, page)
    by_value = table(project, "heads").filter(pl.col("score") == "locos").sort("value")

    def heading():
        return chromium.find_element(By.CSS_SELECTOR, "#ranking [data-key=value]")

    def order():
        return heading().find_element(By.XPATH, "..").get_attribute("aria-sort")

    assert order() == "descending"
    heading().click()
    assert order() == "ascending"
    assert first_row(chromium)[0] == f"{by_value['layer'][0]}-{by_value['head'][0]}"
    heading().send_keys(Keys.ENTER)  # the focus stays on the heading
    assert order() == "descending"
    chromium.find_element(By.ID, "more").click()
    assert len(chromium.find_elements(By.CSS_SELECTOR, "#ranking tbody tr")) == 32


def test_the_keyboard_reaches_a_head_and_moves_between_heads(chromium, page):
    open_page(chromium, page)
    chromium.find_element(By.ID, "score").send_keys(Keys.TAB)
    for _ in range(5):
        if chromium.switch_to.active_element.get_attribute("role") == "gridcell":
            break
        ActionChains(chromium).send_keys(Keys.TAB).perform()
    assert chromium.switch_to.active_element.get_attribute("data-head") == "2-0"
    ActionChains(chromium).send_keys(Keys.ARROW_DOWN, Keys.ARROW_RIGHT).perform()
    assert "Layer 3, head 1" in detail(chromium)
    ActionChains(chromium).send_keys(Keys.HOME).perform()
    assert "Layer 0, head 1" in detail(chromium)


def test_html_in_a_question_or_answer_shows_as_text(chromium, hostile_page):
    open_page(chromium, hostile_page)
    assert chromium.title != "broken in"
    cells = [cell.text for cell in chromium.find_elements(By.CSS_SELECTOR, ".answers td")]
    assert sum(text.startswith(HOSTILE) for text in cells) >= 8
    assert chromium.find_elements(By.CSS_SELECTOR, "img[src=x]") == []


def test_everything_has_a_name_for_a_screen_reader(chromium, page):
    open_page(chromium, page)
    assert chromium.find_element(By.TAG_NAME, "html").get_attribute("lang") == "en"
    for figure in chromium.find_elements(By.CSS_SELECTOR, "figure img"):
        assert len(figure.get_attribute("alt")) > 40
        assert int(figure.get_attribute("naturalWidth")) > 100  # the SVG was read
    for shown in chromium.find_elements(By.CSS_SELECTOR, "main table:not(#detail table)"):
        assert shown.find_elements(By.TAG_NAME, "caption") or shown.accessible_name
    for control in chromium.find_elements(By.CSS_SELECTOR, "button, select, [tabindex='0']"):
        assert control.accessible_name or control.tag_name == "pre"


def test_models_stand_side_by_side(chromium, project, comparison):
    open_page(chromium, comparison)
    shown = chromium.find_element(By.CSS_SELECTOR, "table.models[data-task=nonliteral]")
    names = [cell.text for cell in shown.find_elements(By.CSS_SELECTOR, "thead th")]
    assert names == ["heads", "k", "tiny", "half"]
    first = shown.find_elements(By.CSS_SELECTOR, "tbody tr:first-child [data-value]")
    assert [float(cell.get_attribute("data-value")) for cell in first] == [1.0, 0.5]


def logits(driver, selector: str) -> float:
    """Return a number that the page shows."""
    text = driver.find_element(By.CSS_SELECTOR, selector).text
    return float(text.split()[0].replace("\N{MINUS SIGN}", "-"))


def colours(driver, selector: str) -> list[str]:
    script = (
        "return [...document.querySelectorAll(arguments[0])].map((e) => e.style.backgroundColor)"
    )
    return driver.execute_script(script, selector)


def test_a_trace_shows_its_document_and_the_best_head(chromium, trace):
    open_page(chromium, trace)
    assert chromium.find_element(By.TAG_NAME, "h1").text.startswith("which character has been to")
    assert "Ivan Holm" in chromium.find_element(By.ID, "said").text
    assert "Ivan Holm lives next to Kiasma ." in chromium.find_element(By.ID, "text").text
    # The planted prior writes every name, more than the head that retrieves this one.
    assert "Layer 3, head 2" in detail(chromium)


def test_source_tokens_of_a_head_sum_to_what_it_wrote(chromium, project, trace):
    open_page(chromium, trace)
    heads, tokens = (table(project, f"traces/kiasma.{kind}") for kind in ("heads", "tokens"))
    Select(chromium.find_element(By.ID, "heads")).select_by_visible_text("head 2-0")
    buttons = chromium.find_elements(By.CSS_SELECTOR, "#answer button")
    steps = heads["step"].unique().sort().to_list()
    assert len(buttons) == 1 + len(steps)
    for button, step in zip(buttons[1:], steps, strict=True):
        button.click()
        assert button.get_attribute("aria-pressed") == "true"
        total = heads.filter(step=step, layer=2, head=0)["phi"].item()
        assert tokens.filter(step=step, layer=2, head=0)["phi"].sum() == pytest.approx(
            total, abs=1e-3
        )
        titles = [
            s.get_attribute("title") for s in chromium.find_elements(By.CSS_SELECTOR, "#text span")
        ]
        shown = sum(float(title.split()[0].replace("\N{MINUS SIGN}", "-")) for title in titles)
        assert shown == pytest.approx(total, rel=1e-2, abs=1e-2)  # three digits a token
        assert logits(chromium, "#text-sum") == pytest.approx(total, rel=1e-2, abs=1e-3)


def test_choosing_an_answer_token_or_a_head_recolours_the_trace(chromium, trace):
    open_page(chromium, trace)
    map_, total = colours(chromium, "#map td"), logits(chromium, "#text-sum")
    assert len(map_) == 32
    chromium.find_elements(By.CSS_SELECTOR, "#answer button")[-1].click()
    assert colours(chromium, "#map td") != map_
    # Head 2-0 writes the same from the same source into both tokens: half of the sum, in the same colours.
    assert logits(chromium, "#text-sum") == pytest.approx(total / 2, rel=1e-2)
    before = colours(chromium, "#text span"), logits(chromium, "#text-sum")
    choice = Select(chromium.find_element(By.ID, "heads"))
    choice.select_by_index(len(choice.options) - 1)
    assert colours(chromium, "#text span") != before[0]
    assert logits(chromium, "#text-sum") != before[1]


def test_the_strongest_source_tokens_are_those_of_the_table(chromium, project, trace):
    open_page(chromium, trace)
    tokens = table(project, "traces/kiasma.tokens")
    best = json.loads(
        chromium.execute_script(
            "const d = JSON.parse(document.getElementById('data').textContent);"
            "return JSON.stringify(d.top.map((h) => d.chosen[h]))"
        )
    )
    chosen = tokens.join(
        pl.DataFrame(best, schema={"layer": pl.Int32, "head": pl.Int32}, orient="row"),
        on=["layer", "head"],
    )
    written = chosen.group_by("position").agg(pl.col("phi").sum(), pl.col("region").first())
    strong = pl.col("phi") > written["phi"].abs().max() / 100
    expected = written.filter(strong).sort("phi", descending=True).head(8)
    rows = [
        [cell.text for cell in row.find_elements(By.TAG_NAME, "td")]
        for row in chromium.find_elements(By.CSS_SELECTOR, "#sources tbody tr")
    ]
    shown = [float(row[3].replace("\N{MINUS SIGN}", "-")) for row in rows]
    assert shown == pytest.approx(expected["phi"].to_list(), rel=0.01, abs=2e-3)
    # The landmark's token, whose value is the name, wrote most by far.
    assert [rows[0][0], int(rows[0][1]), rows[0][2]] == [
        "Kiasma",
        expected["position"][0],
        expected["region"][0],
    ]


def test_report_and_trace_link_to_each_other(chromium, page, trace):
    open_page(chromium, page)
    chromium.find_element(By.LINK_TEXT, "kiasma").click()
    assert chromium.current_url == trace.as_uri()
    chromium.find_element(By.LINK_TEXT, "tiny").click()
    assert chromium.current_url == page.as_uri()


def test_html_in_a_trace_shows_as_text(chromium, hostile_trace_page):
    open_page(chromium, hostile_trace_page)
    assert chromium.title != "broken in"
    assert chromium.find_element(By.TAG_NAME, "h1").text == HOSTILE
    assert chromium.find_elements(By.CSS_SELECTOR, "#answer button")[-1].text == HOSTILE
    assert chromium.find_element(By.CSS_SELECTOR, "#text span").text == HOSTILE
    assert chromium.find_elements(By.TAG_NAME, "img") == []


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", ["page", "comparison", "trace"])
def test_a_page_fits_its_window(chromium, request, tmp_path, name, width):
    open_page(chromium, request.getfixturevalue(name), width)
    assert chromium.execute_script("return document.documentElement.scrollWidth") <= width
    # In one screen, before any scrolling: what the result is.
    if name == "page":
        headline = chromium.find_element(By.CLASS_NAME, "headline")
        assert headline.rect["y"] + headline.rect["height"] < 900
    picture = chromium.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})
    (tmp_path / f"{name}-{width}.png").write_bytes(base64.b64decode(picture["data"]))


def test_the_dark_scheme_is_dark_with_light_text(chromium, page):
    def brightness(property_name):
        body = chromium.find_element(By.TAG_NAME, "body")
        channels = body.value_of_css_property(property_name).split("(")[1].split(",")[:3]
        return sum(int(channel.strip(" )")) for channel in channels) / 3

    open_page(chromium, page)
    for scheme, dark in (("dark", True), ("light", False)):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        assert (brightness("background-color") < 60) is dark
        assert (brightness("color") > 180) is dark


def test_snakemakes_own_report_holds_figures_and_tables_with_captions_and_categories(project):
    run = project.run("--report", "report.zip", "results/tiny/report.html")
    assert run.code == 0, run.text
    with zipfile.ZipFile(project.folder / "report.zip") as archive:
        text = archive.read("report/report.html").decode()
        packed = {Path(name).name for name in archive.namelist()}
    categories = json.loads(re.search(r"categories = (\{.*?\}\});", text)[1])
    for name, category, title, caption in (
        ("heatmap-locos.svg", "Heads", "Every head: locos", "The score of every query head."),
        ("ablation-nonliteral.svg", "Ablation", "Ablation: nonliteral", None),
        ("pass_rates.svg", "Probes", None, None),
        ("heads.parquet", "Heads", None, None),
        ("ablation.parquet", "Ablation", None, None),
        ("report.html", "Report", None, None),
    ):
        assert name in packed
        paths = [path for group in categories[category].values() for path in group]
        assert name in {Path(path).name for path in paths}
        found = re.search(
            rf'"filename": "{name}", "labels": (\{{.*?\}}), .*?"caption": "<p>(.*?)</p>', text
        )
        labels = json.loads(found[1])
        assert labels["model"] == "tiny"
        assert title in (None, labels["figure"])
        assert len(found[2]) > 40
        assert caption is None or found[2].startswith(caption)


def rule_edges(project, *arguments: str) -> set[tuple[str, str]]:
    """Return which rule feeds which on the way to some targets, as Snakemake draws it."""
    run = project.run("--rulegraph", "dot", *arguments)
    assert run.code == 0, run.text
    names = dict(re.findall(r'(\d+)\[label = "([^"\\]+)', run.text))
    return {(names[a], names[b]) for a, b in re.findall(r"(\d+) -> (\d+)", run.text)}


def test_the_rules_drawn_in_the_readme_are_those_that_snakemake_runs(project, trace, tmp_path):
    text = (project.folder / "README.md").read_text(encoding="utf-8")
    lines = re.search(r"```mermaid\ngraph LR\n(.+?)```", text, re.DOTALL)[1].splitlines()
    drawn = {pair for line in lines for pair in pairwise(line.strip().split(" --> "))}
    made = ("report.html", "summary.md", "dissociation.parquet", "traces/kiasma.html")
    real = rule_edges(project, *(f"results/tiny/{name}" for name in made), "results/compare.html")
    # What the finished run has none of: a converted model, and patching.
    default = yaml.safe_load(Path("config.yaml").read_text(encoding="utf-8"))
    more = {
        "models": {"converted": default["models"]["smollm2-135m"]},
        "patching": {"filler": {"dataset": "nolima", "corruption": "filler", "probes": 2}},
        "scores": {"cri": {"patching": "filler", "metric": "logit"}},
    }
    overlay = tmp_path / "more.yaml"
    overlay.write_text(yaml.safe_dump(more), encoding="utf-8")
    target = "results/converted/scores/cri.parquet"
    real |= rule_edges(project, target, "--configfile", str(overlay))
    assert drawn - real == set()
