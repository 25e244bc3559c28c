"""What is left of Ray Serve's messages about deployments that did not start."""

from __future__ import annotations

import pytest

from xmcray.serving.run import mistake_in

MISTAKE = "/state/a is in use by another server, expected one server"
# As Serve writes it; tests/on_ray/test_serving.py (soak) sees a real one.
MESSAGE = """The deployment failed to start 3 times in a row. Error:
ray::ServeReplica:xmcray:Coordinator.initialize_and_get_metadata() (pid=7, ip=127.0.0.1)
  File "/env/xmcray/serving/coordinator.py", line 80, in start
{error}

The above exception was the direct cause of the following exception:

ray::ServeReplica:xmcray:Coordinator.initialize_and_get_metadata() (pid=7, ip=127.0.0.1)
RuntimeError: Traceback (most recent call last):
"""


@pytest.mark.parametrize("name", ["xmcray.errors.ResourceError", "xmcray.errors.ConfigError"])
def test_a_mistake_of_the_user_is_found(name: str) -> None:
    messages = ["", MESSAGE.format(error=f"{name}: {MISTAKE}")]
    assert mistake_in(messages) == MISTAKE


@pytest.mark.parametrize(
    "error",
    [
        "OSError: [Errno 5] Input/output error",
        "RuntimeError: xmcray.errors.ResourceError: a mistake that is quoted",
    ],
)
def test_other_errors_keep_their_traceback(error: str) -> None:
    assert mistake_in(["", MESSAGE.format(error=error)]) is None
