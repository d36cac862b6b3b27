"""A real Prometheus and a real node_exporter, from Debian, for tests.

They are expected where `.ci/run` unpacks them, `build/prometheus-debian`, or where Debian installs them.  Without them
their tests are skipped, unless `TEST_PROMETHEUS=required` makes them fail.
"""

from __future__ import annotations

import json
import shutil
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from kit.ports import quiet_port
from kit.servers.programs import missing, running
from kit.waiting import wait_for

UNPACKED = Path(__file__).parents[3] / "build" / "prometheus-debian" / "usr" / "bin"
START_LIMIT_S = 60.0
ANSWER_S = 60.0


def program(name: str) -> str:
    """`prometheus`, `promtool` or `prometheus-node-exporter`; skips the test if it is missing."""
    found = str(UNPACKED / name) if (UNPACKED / name).exists() else shutil.which(name)
    if found is None:
        missing(
            f"no {name} here: as .ci/run does, unpack its Debian package into build/prometheus-debian", "PROMETHEUS"
        )
    return found


def get(url: str, **query: str) -> str:
    with urllib.request.urlopen(f"{url}?{urllib.parse.urlencode(query)}", timeout=ANSWER_S) as answer:
        text: str = answer.read().decode()
        return text


class Prometheus:
    """One server on this machine."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def is_ready(self) -> bool:
        try:
            return bool(get(f"{self._url}/-/ready"))
        except OSError:
            return False

    def ask(self, query: str) -> list[tuple[dict[str, str], float]]:
        """Labels and values of an instant query."""
        answer = json.loads(get(f"{self._url}/api/v1/query", query=query))
        assert answer["status"] == "success"
        return [(each["metric"], float(each["value"][1])) for each in answer["data"]["result"]]

    def firing(self) -> set[tuple[str, str]]:
        """The firing alerts: name and run id."""
        alerts = json.loads(get(f"{self._url}/api/v1/alerts"))["data"]["alerts"]
        return {(each["labels"]["alertname"], each["labels"]["run_id"]) for each in alerts if each["state"] == "firing"}

    def troubles(self) -> list[str]:
        """Errors in the evaluation of rules."""
        groups = json.loads(get(f"{self._url}/api/v1/rules"))["data"]["groups"]
        return [rule["lastError"] for group in groups for rule in group["rules"] if rule.get("lastError")]


@contextmanager
def prometheus(folder: Path, rules: Path, targets: Mapping[str, Sequence[str]]) -> Iterator[Prometheus]:
    """A server that scrapes as often as it can, once a second.

    Args:
        folder: for its data, its configuration and its output.
        rules: its rule file.
        targets: addresses, by job.
    """
    folder.mkdir()
    jobs = [{"job_name": name, "static_configs": [{"targets": list(at)}]} for name, at in targets.items()]
    every = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config = folder / "prometheus.json"  # JSON is also YAML
    config.write_text(json.dumps({"global": every, "rule_files": [str(rules)], "scrape_configs": jobs}))
    port = quiet_port()
    server = Prometheus(port)
    options = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    with _running(folder, program("prometheus"), *options, f"--web.listen-address=127.0.0.1:{port}"):
        wait_for("Prometheus", server.is_ready, START_LIMIT_S)
        yield server


@contextmanager
def node_exporter(folder: Path, textfiles: Path) -> Iterator[str]:
    """The address of a node_exporter that reads only a folder of files."""
    folder.mkdir()
    at = f"127.0.0.1:{quiet_port()}"
    options = [f"--web.listen-address={at}", "--collector.disable-defaults", "--collector.textfile"]
    textfile = f"--collector.textfile.directory={textfiles}"
    with _running(folder, program("prometheus-node-exporter"), *options, textfile):

        def is_there() -> bool:
            try:
                return bool(get(f"http://{at}/metrics"))
            except OSError:
                return False

        wait_for("node_exporter", is_there, START_LIMIT_S)
        yield at


@contextmanager
def _running(folder: Path, *command: str) -> Iterator[None]:
    with (
        (folder / "output").open("wb") as output,
        running(*command, stdout=output, stderr=output, start_new_session=True),
    ):
        try:
            yield
        except BaseException:
            print((folder / "output").read_text()[-4000:])  # noqa: T201
            raise
