"""The console in a real browser: it shows what happens, at every width, and its playground answers.

Needs Debian's Chromium; without one these tests are skipped, but where $PLIANT_BROWSER is set to `required`.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from support.waiting import HANGS_AFTER_S, wait_until

from e2e.cluster import Cluster
from e2e.load import Load

PATIENT_MS = HANGS_AFTER_S * 1000
SERVICES = ("topics", "e2e-made", "chat", "digits", "echo")
"""One of each kind."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    if chromium is None and os.environ.get("PLIANT_BROWSER") != "required":
        pytest.skip("there is no chromium")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"], timeout=PATIENT_MS)
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Browser, cluster: Cluster) -> Iterator[Page]:
    """The console, on which nothing may go wrong."""
    page = browser.new_page(viewport={"width": 1600, "height": 1000})
    page.set_default_timeout(PATIENT_MS)
    expect.set_options(timeout=PATIENT_MS)
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(f"{cluster.address}/console")
    yield page
    page.close()
    assert not wrong


def alone(page: Page, cluster: Cluster, service: str) -> None:
    """Have the page show the details of one service, and of no other."""
    page.goto("about:blank")
    page.goto(f"{cluster.address}/console#service-{service}")


def ask(http: httpx.Client, number: int) -> str:
    service, body = (("topics", {"inputs": "a"}), ("echo", {"inputs": "b"}))[number % 2]
    return str(http.post(f"/models/{service}", json=body).status_code)


def test_it_shows_every_service_under_load(page: Page, cluster: Cluster) -> None:
    load = Load(cluster.address, 2, ask)
    with load.running():
        load.go_on()
        for service in SERVICES:
            page.get_by_role("link", name=service, exact=True).click()
            expect(page.locator(f"#service-{service} h2")).to_contain_text(service)
            expect(page.locator(f"#service-{service} figcaption").first).to_have_text("Requests per second")
            if service in ("topics", "echo"):
                expect(page.locator(f"#service-{service} figure").first).to_contain_text("ok")
        expect(page.locator("#now div").first).to_contain_text("%")
        page.get_by_role("link", name="topics", exact=True).click()
        expect(page.locator("#service-topics table")).to_contain_text(next(iter(cluster.stats())))


def test_it_is_there_after_two_requests_of_less_than_150_kb(browser: Browser, cluster: Cluster) -> None:
    page = browser.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if request.url.startswith("http") else None)
    page.goto(f"{cluster.address}/console", timeout=PATIENT_MS)
    expect(page.locator("#try button")).to_be_visible(timeout=PATIENT_MS)
    page.wait_for_function("performance.getEntriesByName('first-contentful-paint').length", timeout=PATIENT_MS)
    [paint] = page.evaluate("performance.getEntriesByName('first-contentful-paint').map(entry => entry.startTime)")
    page.close()
    [first, stream] = asked
    received = bytes_of_first_event(first) + bytes_of_first_event(stream)
    print(f"first paint after {paint:.0f} ms, everything with {received} bytes")
    assert 0 < received < 150_000


def bytes_of_first_event(url: str) -> int:
    """As they travel, until the first event of a stream is there, or all of what is none."""
    with httpx.stream("GET", url, timeout=HANGS_AFTER_S) as answer:
        is_stream = answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if is_stream and not line:
                break
        return answer.num_bytes_downloaded


def test_a_service_is_found_by_its_name(page: Page) -> None:
    page.get_by_role("link", name="digits", exact=True).click()
    expect(page).to_have_url(re.compile("#service-digits$"))
    expect(page.locator("#service-digits h2")).to_be_in_viewport()


def test_a_page_of_one_service_shows_that_alone_and_the_way_back(page: Page, cluster: Cluster) -> None:
    alone(page, cluster, "chat")
    expect(page.locator("#service-chat h2")).to_be_in_viewport()
    expect(page.locator("[id^=service-]")).to_have_count(1)
    page.fill("#try textarea", "as it was")
    page.get_by_role("link", name="pliant").click()
    expect(page.locator("[id^=service-]").nth(1)).to_be_visible()
    expect(page.locator("#try textarea")).to_have_value("as it was")


def test_memory_of_a_language_model_is_one_bar_for_each_replica(page: Page, cluster: Cluster) -> None:
    alone(page, cluster, "chat")
    for replica in cluster.stats("chat"):
        expect(page.get_by_role("img", name=re.compile(f"{replica}: requests .*, free .* MiB"))).to_be_visible()


@pytest.mark.parametrize("width", [390, 1600])
def test_nothing_is_wider_than_the_screen(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    expect(page.locator("#try button")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_playground_answers(page: Page) -> None:
    page.select_option("#try select", "echo")
    page.fill("#try textarea", "say this")
    page.click("#try button")
    expect(page.locator("#try pre")).to_contain_text("say this")
    expect(page.locator("#try pre")).to_contain_text("200 after")
    expect(page.locator("#try pre")).to_contain_text(re.compile(r"attempt [0-9.]+ ms: \w+ of echo answered"))
    page.get_by_role("combobox", name=re.compile("^Service")).focus()
    page.keyboard.type("chat")
    page.keyboard.press("Tab")
    page.keyboard.type("Explain the for statement.")
    for _ in range(2):  # past the adapter
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator("#try pre")).to_contain_text("first token after")


def test_a_cascade_s_flow_is_drawn_and_said_in_words(page: Page, cluster: Cluster) -> None:
    alone(page, cluster, "e2e-made")
    expect(page.get_by_role("img", name=re.compile("Texts through the levels: .* answers")).first).to_be_visible()


def test_a_killed_replica_is_among_the_events(page: Page, cluster: Cluster) -> None:
    before = set(cluster.stats("echo"))
    cluster.replica_processes("echo")[0].kill()
    wait_until(lambda: len(set(cluster.stats("echo")) - before) == 1, cluster.progress)
    expect(page.locator("#events")).to_contain_text("has left")


def test_the_page_goes_on_with_the_gateway_that_takes_over(browser: Browser, cluster: Cluster) -> None:
    page = browser.new_page()  # one that may say that nobody answered
    page.goto(f"{cluster.address}/console", timeout=PATIENT_MS)
    gateway = page.locator("#now div").last
    expect(gateway).to_contain_text("1 of", timeout=PATIENT_MS)
    before = gateway.inner_text()
    for process in cluster.replica_processes("gateway"):
        process.kill()
    expect(gateway).not_to_have_text(before, timeout=PATIENT_MS, use_inner_text=True)
    expect(page.locator("#state")).to_have_text("live", timeout=PATIENT_MS)
    page.close()
