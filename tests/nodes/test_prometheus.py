"""The rules and queries of `docs/reference/http.md`, asked of a real Prometheus that scrapes a real job of several agents."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from kit.agents import FAIL, FAIL_CODE, c10d, team_of
from kit.launching import Launcher, wait_for
from kit.metrics_text import DOCS
from kit.ports import quiet_port
from kit.prometheus import node_exporter, program, prometheus

from aelastic.group.worker_env import HEALTH_PORT_VARIABLE

RULES = DOCS.parents[1] / "prometheus-rules.yml"
# Longer than the test waits.
LINGER = "600"


def documented() -> str:
    """The query that the page shows."""
    (query,) = re.findall(r"```promql\n(.*?)```", DOCS.read_text(), re.DOTALL)
    return str(query)


def test_the_page_names_each_rule() -> None:
    rules = re.findall(r"^ +- (?:record|alert): (\S+)$", RULES.read_text(), re.MULTILINE)
    assert rules
    page = DOCS.read_text()
    assert [rule for rule in rules if f"`{rule}`" not in page] == []


def test_promtool_takes_the_rules() -> None:
    checked = subprocess.run(
        [program("promtool"), "check", "rules", RULES], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.all
def test_a_restart_of_three_agents_is_one_and_the_failed_job_is_told_of(launch: Launcher, tmp_path: Path) -> None:
    ports = [quiet_port() for _ in range(3)]
    textfiles = tmp_path / "textfiles"
    textfiles.mkdir()
    with (
        team_of(launch, c10d(), "3", options=["--max-restarts", "1", "--linger", LINGER]) as team,
        node_exporter(tmp_path / "exporter", textfiles) as exporter,
        prometheus(
            tmp_path / "prometheus", RULES, {"aelastic": [f"127.0.0.1:{port}" for port in ports], "node": [exporter]}
        ) as server,
    ):
        for number, port in enumerate(ports):
            wrapper = f"import os\nos.environ[{HEALTH_PORT_VARIABLE!r}] = '127.0.0.1:{port}'\n"
            team.start("--metrics-textfile", str(textfiles / f"{number}.prom"), wrapper=wrapper)
        run_id, agents = team.run_id, team.agents
        first = team.wait_round(agents)

        def asked(query: str, **labels: str) -> float | None:
            found = [value for own, value in server.ask(query) if labels.items() <= own.items()]
            assert len(found) <= 1, f"{query} counts a job more than once: {server.ask(query)}"
            return found[0] if found else None

        def counted() -> float | None:
            return asked("run:aelastic_restart_count:max", run_id=run_id)

        wait_for("all agents are scraped", lambda: len(server.ask("aelastic_ready == 1")) == 3)
        wait_for("the rule knows the job", lambda: counted() == 0)

        first.tell(FAIL, 0)
        second = team.wait_round(agents, first)
        wait_for("one restart", lambda: counted() == 1)

        failures = 'sum(aelastic_restarts_total{cause="failure"})'
        wait_for("each agent has counted it", lambda: asked(failures) == 3)
        # `increase` extrapolates what one sample in a short life has shown.
        by_cause = "run_cause:aelastic_restarts:increase1h"
        wait_for("about one", lambda: 0.9 < (asked(by_cause, run_id=run_id, cause="failure") or 0) < 2)
        assert asked(by_cause, run_id=run_id, cause="membership") == 0
        wait_for("the time it took", lambda: (asked("run:aelastic_restart_seconds:rate1h", run_id=run_id) or 0) > 0)
        assert (asked(documented(), run_id=run_id) or 0) > 0
        assert not server.firing()

        second.tell(FAIL, 1)
        # Each agent's server waits until the end was read, and no longer.
        assert [agent.wait() for agent in agents] == [FAIL_CODE] * 3, team.story
        wait_for("the alert", lambda: ("AelasticJobFailed", run_id) in server.firing())
        # Nothing can be scraped any more but the files, which stay.
        wait_for("the agents are gone", lambda: asked('sum(up{job="aelastic"})') == 0)
        wait_for("files of all agents", lambda: len(server.ask('aelastic_run_ended{state="FAILED"}')) == 3)
        assert asked("node_textfile_scrape_error") == 0
        wait_for("the files alone", lambda: counted() == 1 and not server.ask('aelastic_restart_count{textfile=""}'))
        assert server.troubles() == []
