"""The page at / and the API page in headless Chromium, against a small server that answers by the schema.

answers.json holds recorded answers. XMCRAY_SCREENSHOTS=FOLDER writes pictures of what is tested into FOLDER.
"""

import shutil
import tempfile
from collections.abc import Iterator
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest
from chromium import Browser
from page_server import FILL, LABELS, MARKUP, MEMORY, PAGE, PEAKS, RECORDED, Server, recorded, uids
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from xmcray.serving.schema import (
    MAX_K,
    SearchRequest,
    SearchResponse,
)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    programs = [shutil.which("chromium"), shutil.which("chromedriver")]
    missing = [
        name
        for name, found in zip(("chromium", "chromium-driver"), programs, strict=True)
        if not found
    ]
    if missing:
        pytest.skip(
            f"Debian package {' and '.join(missing)} is missing: run tests/install.sh as root"
        )
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(str(programs[0]), str(programs[1]), profile)
        yield browser
        browser.driver.quit()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def page(chromium: Browser, server: Server) -> Iterator[Browser]:
    """After each test: no breach of the CSP, nothing else in the console, and no other origin was asked for."""
    chromium.messages()  # of the test before, and its requests
    chromium.read_network().clear()
    yield chromium
    assert chromium.messages() == []
    asked = [
        one["params"]["request"]["url"]
        for one in chromium.read_network()
        if "request" in one["params"]
    ]
    others = {
        url for url in asked if not url.startswith(("data:", "about:", "chrome"))
    }  # chrome: the first empty tab
    assert {urlsplit(url).netloc.rpartition("@")[2] for url in others} == {
        urlsplit(server.origin).netloc
    }


def test_answers_come_while_typing_in_order_with_scores_and_times(
    page: Browser, server: Server
) -> None:
    page.open(server.url())
    page.until(lambda: page.one("#welcome").text)
    assert "2,200 labels" in page.one("#welcome").text
    page.picture("welcome")
    page.one("#query").send_keys(PEAKS)  # and no Enter
    page.until(lambda: page.texts(".title") == uids(PEAKS, LABELS))
    assert page.texts(".text")[0] == "Find peaks inside a signal based on peak properties."
    assert page.texts(".number") == [f"{answer['score']:.3f}" for answer in recorded(PEAKS, LABELS)]
    shares = page.js(
        "return [...document.querySelectorAll('.bar > span')].map((bar) => parseFloat(bar.style.width))"
    )
    scores = [answer["score"] for answer in recorded(PEAKS, LABELS)]
    assert shares == pytest.approx([100 * score / scores[0] for score in scores], abs=0.01)
    version = RECORDED["models"][0]["version"]
    meta = page.one(".meta").text
    assert version[:8] in meta
    assert page.one(".meta code").get_attribute("title") == f"Bundle {version}"
    assert f"label log {RECORDED['models'][0]['label_log']}" in meta
    assert f"{RECORDED['answers'][PEAKS][LABELS]['took_ms']:.1f} ms on the server" in meta
    assert page.said().startswith(f"10 answers from {LABELS}")
    page.picture("search_labels")


def test_texts_of_others_are_text_and_no_markup(page: Browser, server: Server) -> None:
    page.open(server.url(q="markup", model=MEMORY))
    page.until(lambda: page.texts(".title") == [MARKUP])
    assert page.texts(".text") == ["u<b>1</b>"]
    assert MARKUP in page.texts(".facts")[0]
    page.one(".why").click()
    assert MARKUP in page.texts(".voters")[0]
    assert page.all("main img") == page.all("main b") == []  # an alert would fail the line above
    assert not any("innerHTML" in path.read_text(encoding="utf-8") for path in PAGE.glob("*.js"))


def test_a_keyboard_is_enough(page: Browser, server: Server) -> None:
    page.open(server.url(q=PEAKS, model=MEMORY))
    page.until(lambda: len(page.all(".answer")) == 10)
    box, answers, dialog = page.one("#query"), page.all(".answer"), page.one("#help")
    page.js("document.activeElement.blur()")
    assert page.press("/") == box
    assert page.press(Keys.ARROW_DOWN, Keys.ARROW_DOWN) == answers[1]
    assert page.press(Keys.ARROW_UP) == answers[0]
    page.press(Keys.ENTER)
    assert answers[0].find_element(By.CSS_SELECTOR, ".why").get_attribute("aria-expanded") == "true"
    assert answers[0].find_element(By.CSS_SELECTOR, ".voters").is_displayed()
    page.press(Keys.ENTER)
    assert not answers[0].find_element(By.CSS_SELECTOR, ".voters").is_displayed()
    assert page.press(Keys.END) == answers[9]
    assert page.press(Keys.ESCAPE) == box
    page.press(Keys.ARROW_DOWN, "?")
    assert dialog.is_displayed()
    page.picture("help")
    page.press(Keys.ESCAPE)
    assert not dialog.is_displayed()
    page.press(Keys.ARROW_DOWN, "c")
    page.until(lambda: f"10 answers from {LABELS}" in page.said() and MEMORY in page.said())
    assert (
        page.press(Keys.HOME) == page.all(".answer")[0]
    )  # still in the list, though it was filled anew
    assert page.press(Keys.ARROW_RIGHT) == page.all(".answer")[10]
    page.press("c", "/", "c?/")  # in the box a key is a letter
    assert (box.get_attribute("value"), dialog.is_displayed()) == ("c?/", False)
    assert page.one("#compare").get_attribute("aria-pressed") == "false"
    page.one("#help-button").click()
    page.one("#single-keys").click()
    page.one("#help-close").click()
    page.press("c", "?")
    assert not dialog.is_displayed()
    assert page.one("#compare").get_attribute("aria-pressed") == "false"
    page.js("localStorage.clear()")


def test_two_models_side_by_side(page: Browser, server: Server) -> None:
    page.open(server.url(q=PEAKS))
    page.until(lambda: page.texts(".title") == uids(PEAKS, LABELS))
    page.one("#compare").click()
    left = uids(PEAKS, LABELS)
    right = uids(PEAKS, MEMORY)
    page.until(lambda: page.texts(".title") == left + right)
    marks = page.js(
        "return [...document.querySelectorAll('.foot')].map((one) => one.firstElementChild.innerText)"
    )
    expected = [
        "only here"
        if uid not in other
        else f"no. {other.index(uid) + 1} on the {where}"
        if other.index(uid) != row
        else "scipy"
        for mine, other, where in ((left, right, "right"), (right, left, "left"))
        for row, uid in enumerate(mine)
    ]
    assert [mark.removeprefix("package ") for mark in marks] == expected
    assert {"only here", "no. 2 on the right", "scipy"} <= set(expected)
    assert parse_qs(urlsplit(page.driver.current_url).fragment)["with"] == [MEMORY]
    page.all(".side + .side .why")[1].click()
    page.picture("search_page", 1280, 860)
    page.picture("search_page_dark", 1280, 860, scheme="dark")
    page.one(f".side .model option[value={MEMORY}]").click()  # now the same on the left
    page.until(lambda: page.texts(".title") == right + right)
    assert "only here" not in page.texts(".foot")


def test_a_memory_tells_why(page: Browser, server: Server) -> None:
    page.open(server.url(q=FILL, model=MEMORY))
    page.until(lambda: page.texts(".title") == uids(FILL, MEMORY))
    best = recorded(FILL, MEMORY)[0]
    assert page.texts(".number")[0] == f"{100 * best['score']:.1f} %"
    page.all(".why")[0].click()
    why = page.all(".voters")[0]
    assert f"{len(best['voters'])} training queries voted" in why.text
    lines = page.texts(".voters li")
    shown = [f"{100 * voter['weight']:.1f} %\n{voter['uid']}" for voter in best["voters"][:8]]
    assert [line.rpartition("\n")[0] for line in lines[:8]] == shown
    rest = sum(voter["weight"] for voter in best["voters"][8:])
    assert lines[8] == f"{100 * rest:.1f} %\n{len(best['voters']) - 8} more, together"
    own = best["score"] - sum(voter["weight"] for voter in best["voters"])
    assert lines[9].startswith(f"{100 * own:.1f} %")
    assert (lines[9].endswith("own text"), len(lines)) == (True, 10)
    page.picture("why")
    page.picture("why_320", width=320, height=800)
    page.ask("long")
    page.until(lambda: page.texts(".number") == ["no vote"])
    assert page.one(".note").text.startswith("Only 1 label found. The model reads 128 tokens;")


def test_an_error_is_one_sentence_and_leaves_with_the_next_search(
    page: Browser, server: Server
) -> None:
    page.open(server.url(q="broken"))
    error = ".side:not([hidden]) .error"
    page.until(
        lambda: (
            page.texts(error)
            == ["All 8 places of the queue are taken; send the request again in 2 s."]
        )
    )
    page.picture("error")
    [message] = page.messages()
    assert "503" in message  # Chromium reports the answer; nothing else is there
    page.ask(PEAKS)
    page.until(lambda: page.texts(".title") == uids(PEAKS, LABELS))
    assert page.texts(error) == []
    page.ask("none")
    page.until(lambda: page.texts(".side:not([hidden]) .note") == ["No label found."])


def test_a_server_that_is_not_ready_is_asked_again_with_enter(
    page: Browser, server: Server
) -> None:
    server.ready = False
    page.open(server.url(k=5))
    page.until(lambda: page.texts("#error") == ["No model is loaded yet."])
    server.ready = True
    page.ask(PEAKS)
    page.until(lambda: page.texts(".title") == uids(PEAKS, LABELS)[:5])
    assert page.texts("#error") == []
    assert all("503" in message for message in page.messages())


def test_the_address_holds_the_search_and_filters_are_sent(page: Browser, server: Server) -> None:
    page.open(server.url(q=PEAKS, k=20, model=MEMORY, where="package", **{"is": "scipy"}))
    kept = [uid for uid in uids(PEAKS, MEMORY) if uid.startswith("scipy.")]
    page.until(lambda: page.texts(".title") == kept)
    assert server.bodies[-1]["k"] == 20
    assert page.one(".note").text == f"Only {len(kept)} labels passed the filter."
    value = page.one("#value")
    for name, text, condition in (
        ("package", "numpy, scipy", ["numpy", "scipy"]),
        ("package", "7", ["7"]),  # a text, as the answers have shown
        ("year", '7, "7"', [7, "7"]),
        ("year", "true", [True]),
        ("year", "-1.5..2e3", {"gte": -1.5, "lte": 2000}),
        ("year", "..3", {"lte": 3}),
        ("year", "> 3", {"gt": 3}),
        ("year", "<=0.5", {"lte": 0.5}),
    ):
        page.one(f"#attribute option[value={name}]").click()
        value.clear()
        value.send_keys(text)
        page.until(lambda f={name: condition}: server.bodies[-1].get("filter") == {"attributes": f})
    settings = parse_qs(urlsplit(page.driver.current_url).fragment)
    assert settings == {
        "q": [PEAKS],
        "k": ["20"],
        "model": [MEMORY],
        "where": ["year"],
        "is": ["<=0.5"],
    }
    page.js("location.hash = arguments[0]", urlencode({"q": FILL, "k": 5}))
    page.until(lambda: page.texts(".title") == uids(FILL, LABELS)[:5])
    assert "filter" not in server.bodies[-1]


def test_a_late_answer_to_an_earlier_query_is_dropped(page: Browser, server: Server) -> None:
    page.open(server.url(q="slow"))
    assert server.slow_came.wait(60)
    page.ask(PEAKS)
    page.until(lambda: page.texts(".title") == uids(PEAKS, LABELS))
    page.until(lambda: any(one["params"].get("canceled") for one in page.read_network()))
    server.answers_slow.set()
    assert page.texts(".title") == uids(PEAKS, LABELS)


# The contrast of each text with what is painted behind it (WCAG 2), the smallest first.
CONTRAST = """
const light = (color) => {
  const [r, g, b] = color.match(/[\\d.]+/g).map(Number).map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const behind = (one) => {
  for (; one; one = one.parentElement) {
    const color = getComputedStyle(one).backgroundColor;
    if (!/, 0\\)$/.test(color)) return color;
  }
  return "rgb(255, 255, 255)";
};
return [...document.querySelectorAll("body *")]
  .filter((one) => one.checkVisibility() && [...one.childNodes].some((n) => n.nodeType === 3 && n.data.trim()))
  .map((one) => [light(getComputedStyle(one).color), light(behind(one)), one.className || one.tagName])
  .map(([a, b, name]) => [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), name]).sort((a, b) => a[0] - b[0]);
"""


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_readable_in_light_and_dark_and_on_a_small_screen(
    page: Browser, server: Server, path: str
) -> None:
    page.open(server.url(path, **{"q": PEAKS, "with": MEMORY} if path == "/" else {}))
    page.until(lambda: len(page.all(".answer" if path == "/" else ".endpoint")) > 8)
    papers = []
    for scheme in ("light", "dark"):
        page.device(1280, 900, scheme)
        contrasts = page.js(CONTRAST)
        assert contrasts[0][0] >= 4.5, contrasts[:5]
        assert len(contrasts) > 40
        papers.append(page.js("return getComputedStyle(document.body).backgroundColor"))
    assert papers[0] != papers[1]
    page.device(320, 640)
    assert page.js("return document.documentElement.scrollWidth") <= 320


def test_the_api_page_names_every_endpoint_and_field(page: Browser, server: Server) -> None:
    page.open(server.url("/docs"))
    page.until(lambda: page.one("#main").get_attribute("aria-busy") == "false")
    assert [text for text in page.texts("h2 code") if text] == ["GET /v1/models", "POST /v1/search"]
    names = page.texts("#post-v1-search dt code")
    assert names == [*SearchRequest.model_fields, *SearchResponse.model_fields]
    fields = dict(zip(names, page.texts("#post-v1-search dd"), strict=True))
    about = "answers per text; fewer come back where fewer labels pass the filter."
    assert fields["k"] == f"integer, 1 to {MAX_K:,}, default 10\n{about}"
    assert page.one("#post-v1-search a[href='#Filter']").text == "Filter"
    assert page.texts("#post-v1-search .errors") == ["Or 422 Unprocessable Entity: Problem."]
    assert {"Problem", "Filter", "Answer", "Voter", "Range"} <= set(page.texts("h3 code"))
    assert "SearchRequest" not in page.texts("h3 code")  # described with its route
    page.picture("docs")
    page.picture("docs_dark", scheme="dark")


def test_a_calibrated_bundle_shows_probabilities_its_main_part_and_a_slider(
    page: Browser, server: Server
) -> None:
    server.fused = True
    page.open(server.url(q=PEAKS))
    page.until(lambda: page.texts(".title") == uids(PEAKS, LABELS))
    assert page.texts(".number")[:2] == ["95.0 %", "90.0 %"]
    assert page.texts(".part")[:2] == [
        "mostly label vectors (dexml)",
        "mostly training queries with similar words",
    ]
    assert "score" in page.one(".number").get_attribute("title")
    page.picture("probabilities")
    assert page.one("#least-shown").text == "any probability"
    page.one("#least").send_keys(Keys.END)
    page.until(lambda: len(page.all(".answer")) == 1)
    assert page.one("#least-shown").text == "95.0 %"
    assert page.one(".note").text == "Only 1 label reached a probability of 95.0 %."
    assert "least=0.95" in page.driver.current_url
    assert server.bodies[-1]["min_probability"] == 0.95
    server.fused = False
    page.open(server.url(q=PEAKS, least=0.5))
    page.until(lambda: page.texts(".title") == uids(PEAKS, LABELS))
    assert not page.one("#least-control").is_displayed()
    assert "min_probability" not in server.bodies[-1]


def test_answers_are_accepted_and_rejected_where_events_are_collected(
    page: Browser, server: Server
) -> None:
    page.open(server.url(q=PEAKS))
    page.until(lambda: page.texts(".title") == uids(PEAKS, LABELS))
    assert not page.texts(".verdict"), "nothing is collected"
    server.collects = True
    page.open(server.url(q=PEAKS))
    page.until(lambda: page.texts(".verdict"))
    page.picture("verdict")
    accept, reject = page.all(".answer:nth-child(2) .verdict button")
    uid = uids(PEAKS, LABELS)[1]
    assert accept.accessible_name == f"accept {uid}"
    accept.click()
    page.until(lambda: accept.get_attribute("aria-pressed") == "true")
    assert page.said() == f"{uid}: accepted."
    body = {"request_id": "1", "label": uid, "event": "accept", "text": 0, "model": LABELS}
    assert server.feedback == [body]
    reject.click()
    page.until(lambda: "disk is full" in page.one(".note").text)
    assert accept.get_attribute("aria-pressed") == "true"
    assert reject.get_attribute("aria-pressed") == "false"
    assert not page.all(".answer.open"), "a verdict does not open an answer"
    # The browser itself reports the status of a refused request.
    assert all("503" in message for message in page.messages())
