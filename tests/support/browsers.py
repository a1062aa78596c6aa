"""A browser without a window and without a network, for pages that are files."""

import contextlib
import os
import shutil
import tempfile
import time

PROGRAM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = None if PROGRAM and DRIVER else "there is no chromium with its chromedriver"
ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--proxy-server=127.0.0.1:9",
)
SECONDS = 60.0  # until a page must be there, on a machine that is busy


@contextlib.contextmanager
def browser(width=1280, height=1000):
    """A driver of chromium."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = PROGRAM
    for argument in (*ARGUMENTS, f"--window-size={width},{height}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # it leaves files behind
        service = webdriver.ChromeService(DRIVER, env={**os.environ, "TMPDIR": folder})
        driver = webdriver.Chrome(options=options, service=service)
        try:
            yield driver
        finally:
            driver.quit()


def wait(driver, script):
    """Waits until a script returns something true."""
    end = time.monotonic() + SECONDS
    while not (found := driver.execute_script(script)):
        assert time.monotonic() < end, script
        time.sleep(0.05)
    return found


class Page:
    """A report in a browser."""

    def __init__(self, driver, path):
        """Opens it, and waits until the trace can be seen."""
        self.driver = driver
        driver.get(path.as_uri())
        self.wait("return document.body.dataset.ready === 'yes'")

    def run(self, script, *arguments):
        """What a script returns."""
        return self.driver.execute_script(script, *arguments)

    def wait(self, script):
        """Waits until a script returns something true."""
        return wait(self.driver, script)

    def bars(self, colour, chart="trace"):
        """The bars of a colour that are drawn: (left, right, top, bottom), in pixels of the plot."""
        return self.run(
            """
            const [chart, colour] = arguments;
            const probe = document.createElement("i");
            probe.style.color = colour;
            return [...document.querySelectorAll(`#${chart} .scatterlayer path.js-fill`)]
              .filter((path) => path.style.fill === probe.style.color)
              .flatMap((path) => path.getAttribute("d").split("M").slice(1))
              .map((part) => {
                const numbers = part.match(/-?[\\d.]+(e-?\\d+)?/g).map(Number);
                const x = numbers.filter((_, at) => at % 2 === 0), y = numbers.filter((_, at) => at % 2);
                return [Math.min(...x), Math.max(...x), Math.min(...y), Math.max(...y)];
              })
              .filter((bar) => bar[3] > bar[2]);
            """,
            chart,
            colour,
        )

    def area(self):
        """The plot of the trace in the window: (left, top, width, height)."""
        return self.run(
            """
            document.getElementById("trace").scrollIntoView({block: "center"});
            const box = document.querySelector("#trace .nsewdrag").getBoundingClientRect();
            return [box.left, box.top, box.width, box.height];
            """
        )

    def point(self, bar, clicks=False):
        """Moves the pointer to the middle of a bar, and clicks there or not."""
        left, top, _width, _height = self.area()
        x, y = left + (bar[0] + bar[1]) / 2, top + (bar[2] + bar[3]) / 2
        self._act(lambda pointer: pointer.move_to_location(int(x), int(y)), clicks)

    def drag(self, begin, end):
        """Drags from one place to another, in shares of the plot's width."""
        left, top, width, height = self.area()
        y = int(top + height / 2)

        def act(pointer):
            pointer.move_to_location(int(left + begin * width), y)
            pointer.pointer_down()
            pointer.move_to_location(int(left + (begin + end) / 2 * width), y)
            pointer.move_to_location(int(left + end * width), y)
            pointer.pointer_up()

        self._act(act, clicks=False)

    def _act(self, act, clicks):
        from selenium.webdriver.common.actions.action_builder import ActionBuilder

        actions = ActionBuilder(self.driver)
        act(actions.pointer_action)
        if clicks:
            actions.pointer_action.click()
        actions.perform()
        self.run("return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def choose(self, selector, value=None):
        """Clicks what a CSS selector finds, or gives it a value."""
        self.run(
            """
            const found = document.querySelector(arguments[0]);
            if (arguments[1] === null) found.click();
            else {
              found.value = arguments[1];
              found.dispatchEvent(new Event("change"));
            }
            """,
            selector,
            value,
        )

    def text(self, selector):
        """The text of what a CSS selector finds, if it is shown."""
        return self.run("return document.querySelector(arguments[0]).innerText", selector)

    def texts(self, selector):
        """The texts of all that a CSS selector finds; cells of a row are apart by tabs."""
        return self.run(
            """
            const found = [...document.querySelectorAll(arguments[0])];
            return found.map((one) => one.innerText ?? one.textContent);
            """,
            selector,
        )

    def is_hidden(self, selector):
        """Whether what a CSS selector finds is not shown."""
        return self.run("return !document.querySelector(arguments[0]).getClientRects().length", selector)

    def faults(self):
        """What the console has, and what was asked of a network."""
        requests = self.run("return performance.getEntriesByType('resource').map((entry) => entry.name)")
        return [entry["message"] for entry in self.driver.get_log("browser")] + requests
