"""Chromium with what the tests of pages ask of it again and again."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait


class Browser:
    """Chromium with what the tests ask of it again and again."""

    def __init__(self, chromium: str, chromedriver: str, profile: str) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = chromium
        for argument in (
            "headless=new",
            "no-sandbox",
            "disable-gpu",
            "disable-dev-shm-usage",
            "hide-scrollbars",
        ):
            options.add_argument(f"--{argument}")
        options.add_argument(f"--user-data-dir={profile}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options, webdriver.ChromeService(chromedriver))
        self.network: list[dict[str, Any]] = []

    def open(self, url: str) -> None:
        self.driver.get("about:blank")  # a change of the hash alone would not load the page anew
        self.device(1280, 900)
        self.driver.get(url)
        assert self.all("main"), (
            "the page did not come; Chromium wants each challenge of a 401 with a realm"
        )

    def device(self, width: int, height: int, scheme: str = "light", scale: int = 1) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def all(self, css: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, css)

    def one(self, css: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, css)

    def texts(self, css: str) -> list[str]:
        """What a reader sees in all elements, in one go."""
        every = "return [...document.querySelectorAll(arguments[0])]"
        return self.js(
            f"{every}.filter((one) => one.checkVisibility()).map((one) => one.innerText)", css
        )

    def said(self) -> str:
        """What a screen reader announced last."""
        return str(self.js("return document.getElementById('status').textContent"))

    def js(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def until(self, condition: Callable[[], Any]) -> Any:
        return WebDriverWait(self.driver, 10, poll_frequency=0.02).until(lambda _: condition())

    def ask(self, text: str) -> None:
        box = self.one("#query")
        box.clear()
        box.send_keys(text, Keys.ENTER)

    def press(self, *keys: str) -> WebElement:
        """Returns the element that has the focus then."""
        webdriver.ActionChains(self.driver, duration=0).send_keys(*keys).perform()
        return self.driver.switch_to.active_element

    def messages(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def read_network(self) -> list[dict[str, Any]]:
        self.network += [
            json.loads(one["message"])["message"] for one in self.driver.get_log("performance")
        ]
        return self.network

    def picture(
        self, name: str, width: int = 1280, height: int = 800, scheme: str = "light"
    ) -> None:
        if folder := os.environ.get("XMCRAY_SCREENSHOTS"):
            self.device(width, height, scheme)
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.driver.save_screenshot(str(Path(folder) / f"{name}.png"))
            self.device(1280, 900)
