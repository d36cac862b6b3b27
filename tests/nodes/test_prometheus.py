"""The rules and queries of `docs/how-to/prometheus.md`, in a real Prometheus that scrapes a job of several agents."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from kit.agents import FAIL, FAIL_CODE, c10d, team_of
from kit.launching import Launcher
from kit.ports import quiet_port
from kit.servers.prometheus import node_exporter, program, prometheus
from kit.waiting import wait_for

from aelastic.observe.health.address import HEALTH_PORT_VARIABLE
from aelastic.observe.metrics import RunMetrics
from aelastic.observe.run_state import RunState

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "aelastic.json"
PAGE = Path(__file__).parents[2] / "docs/how-to/prometheus.md"
RULES = PAGE.parents[1] / "prometheus-rules.yml"
# Longer than the test waits.
LINGER = "600"


def test_the_page_names_each_rule() -> None:
    rules = re.findall(r"^ +- (?:record|alert): (\S+)$", RULES.read_text(), re.MULTILINE)
    assert rules
    page = PAGE.read_text()
    assert [rule for rule in rules if f"`{rule}`" not in page] == []


def promtool(*words: str | Path, given: str = "") -> None:
    checked = subprocess.run([program("promtool"), *words], input=given, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_promtool_takes_the_metrics_without_a_complaint() -> None:
    metrics = RunMetrics({"version": "0", "python": "3"})
    promtool("check", "metrics", given=metrics.expose(RunState()))


def test_promtool_takes_the_rules() -> None:
    promtool("check", "rules", RULES)


# Alerts: series, one sample per 30 s, and the alerts that fire at the end.
OF_RUN = '{instance="a",job="j"}'
INFO = f'aelastic_run_info{OF_RUN[:-1]},run_id="r",host="h"}}'
STORIES: dict[str, dict[str, str]] = {
    "AelasticRestartsCostTime": {
        'aelastic_time_seconds_total{instance="a",job="j",spent="twice"}': "0+6x120",
        'aelastic_restarts_total{instance="a",job="j",cause="failure"}': "0x60 1x60",
    },
    "AelasticBudgetNearlyUsed": {
        f"aelastic_used_restarts{OF_RUN}": "0x60 3x60",
        f"aelastic_max_restarts{OF_RUN}": "3x120",
    },
    "AelasticHangBrewing": {
        'aelastic_worker_silence_seconds{instance="a",job="j",local_rank="0"}': "0x100 10+30x20",
        'aelastic_worker_silence_seconds{instance="a",job="j",local_rank="1"}': "0x120",
        f"aelastic_worker_silence_max_seconds{OF_RUN}": "600x120",
    },
    "AelasticWaitsForNodes": {
        f"aelastic_phase_start_time_seconds{OF_RUN}": "60x120",
        'aelastic_phase{instance="a",job="j",phase="joining"}': "1x120",
        'aelastic_phase{instance="a",job="j",phase="running"}': "0x120",
    },
    "": {  # a training job whose budget is unused
        'aelastic_time_seconds_total{instance="a",job="j",spent="starting"}': "0+30x120",
        f"aelastic_used_restarts{OF_RUN}": "0x120",
        f"aelastic_max_restarts{OF_RUN}": "3x120",
        'aelastic_worker_silence_seconds{instance="a",job="j",local_rank="0"}': "4x120",
        f"aelastic_worker_silence_max_seconds{OF_RUN}": "600x120",
        f"aelastic_phase_start_time_seconds{OF_RUN}": "60x120",
        'aelastic_phase{instance="a",job="j",phase="joining"}': "0x120",
    },
}


@pytest.mark.parametrize("alert", STORIES)
def test_an_alert_fires_when_it_should_and_not_else(tmp_path: Path, alert: str) -> None:
    series = [{"series": name, "values": values} for name, values in {INFO: "1x120", **STORIES[alert]}.items()]
    where = ', host="h"' if alert == "AelasticHangBrewing" else ""
    firing = f'ALERTS{{alertname="{alert}", alertstate="firing", run_id="r"{where}}}'
    expected = [{"labels": firing, "value": 1}] if alert else []
    question = {"expr": f'ALERTS{{alertname=~"{alert or ".+"}"}}', "eval_time": "60m", "exp_samples": expected}
    story = {"interval": "30s", "input_series": series, "promql_expr_test": [question]}
    path = tmp_path / "test.json"  # JSON is also YAML
    path.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "30s", "tests": [story]}))
    promtool("test", "rules", path)


# The dashboard.


def test_each_query_of_the_dashboard_parses_and_names_what_there_is(tmp_path: Path) -> None:
    targets = [target for panel in json.loads(DASHBOARD.read_text())["panels"] for target in panel["targets"]]
    queries = [re.sub(r"\$__rate_interval", "1m", str(target["expr"])) for target in targets]
    assert len(queries) > 10
    rules = [{"record": f"query_{number}", "expr": query} for number, query in enumerate(queries)]
    path = tmp_path / "queries.json"
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", path)
    series = {
        f"{family.name}{end}"
        for family in RunMetrics({}).registry.families
        for end in (("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",))
    }
    records = set(re.findall(r"^ +- record: (\S+)$", RULES.read_text(), re.MULTILINE))
    named = {name for query in queries for name in re.findall(r"\b(?:\w+:)?aelastic_\w+(?::\w+)?", query)}
    assert named <= series | records, "the dashboard uses unknown metrics"


@pytest.mark.ci
@pytest.mark.all
def test_a_restart_of_three_agents_is_one_and_the_failed_job_is_reported(launch: Launcher, tmp_path: Path) -> None:
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
            return asked("run:aelastic_used_restarts:max", run_id=run_id)

        wait_for("all agents are scraped", lambda: len(server.ask("aelastic_ready == 1")) == 3)
        wait_for("the rule knows the job", lambda: counted() == 0)

        first.send_signal(FAIL, 0)
        second = team.wait_round(agents, first)
        wait_for("one restart", lambda: counted() == 1)

        failures = 'sum(aelastic_restarts_total{cause="failure"})'
        wait_for("each agent has counted it", lambda: asked(failures) == 3)
        # `increase` extrapolates from the single sample of a short life.
        by_cause = "run_cause:aelastic_restarts:increase1h"
        wait_for("about one", lambda: 0.9 < (asked(by_cause, run_id=run_id, cause="failure") or 0) < 2)
        assert asked(by_cause, run_id=run_id, cause="membership") == 0
        wait_for("the time it took", lambda: (asked("run:aelastic_restart_seconds:rate1h", run_id=run_id) or 0) > 0)
        (documented,) = re.findall(r"```promql\n(.*?)```", PAGE.read_text(), re.DOTALL)
        assert (asked(documented, run_id=run_id) or 0) > 0
        wait_for("the budget's alert", lambda: server.firing() == {("AelasticBudgetNearlyUsed", run_id)})
        assert asked("run:aelastic_max_restarts:max", run_id=run_id) == 1
        spent = "run_spent:aelastic_time_seconds:rate1h"
        wait_for("the time it lost", lambda: (asked(spent, run_id=run_id, spent="starting") or 0) > 0)
        assert asked("sum(aelastic_leads)") == 1
        assert asked("max(aelastic_nodes_missing)") == 0
        assert asked('sum(aelastic_failures_total{kind="exit"})') == 1
        assert (asked("min(time() - aelastic_phase_start_time_seconds)") or -1) >= 0
        wait_for("training", lambda: (asked('min(aelastic_time_seconds_total{spent="trained"})') or 0) > 0)

        second.send_signal(FAIL, 1)
        # Each agent's server waits until its last values have been read, and no longer.
        assert [agent.wait() for agent in agents] == [FAIL_CODE] * 3, team.story
        wait_for("the alert", lambda: ("AelasticJobFailed", run_id) in server.firing())
        # Only the files, which stay, can still be scraped.
        wait_for("the agents are gone", lambda: asked('sum(up{job="aelastic"})') == 0)
        wait_for("files of all agents", lambda: len(server.ask('aelastic_run_ended{state="FAILED"}')) == 3)
        assert asked("node_textfile_scrape_error") == 0
        wait_for("the files alone", lambda: counted() == 1 and not server.ask('aelastic_used_restarts{textfile=""}'))
        assert server.troubles() == []
