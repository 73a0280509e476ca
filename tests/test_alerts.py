"""The alerts, by Prometheus' own unit tests, and the dashboard's form. What they say of a running
deployment: tests/test_metrics_scrape.py."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.metrics import METRICS
from tests.prometheus import expressions, needs_prometheus, promtool

ROOT = Path(__file__).parent.parent
MONITORING = ROOT / "k8s" / "components" / "monitoring"
RULES: dict[str, Any] = yaml.safe_load((MONITORING / "rules.yaml").read_text())["spec"]
ALERTS = [rule["alert"] for group in RULES["groups"] for rule in group["rules"]]
CASES = Path(__file__).with_name("alerts.test.yaml")
DASHBOARD = MONITORING / "dashboard.json"
NAMES = {name for metric in METRICS for name in metric.series}


def unit_tests(folder: Path, rules: str) -> tuple[int, str]:
    """Exit code and output of promtool."""
    (folder / "rules.yaml").write_text(rules)
    (folder / CASES.name).write_text(CASES.read_text())
    done = promtool("test", "rules", str(folder / CASES.name))
    return done.returncode, done.stdout + done.stderr


@needs_prometheus
def test_alerts(tmp_path: Path) -> None:
    assert unit_tests(tmp_path, yaml.safe_dump(RULES)) == (
        0,
        f"Unit Testing:  {tmp_path}/{CASES.name}\n  SUCCESS\n\n",
    )
    checked = promtool("check", "rules", str(tmp_path / "rules.yaml"))
    assert checked.returncode == 0, checked.stdout


@needs_prometheus
@pytest.mark.parametrize("expression", ["vector(1)", "vector(1) > 1"], ids=["always", "never"])
def test_each_alert_is_held_by_its_unit_tests(tmp_path: Path, expression: str) -> None:
    """For each there is a case in which it fires, and one in which it does not."""
    rules = [
        rule | {"expr": expression, "for": "0m"} for g in RULES["groups"] for rule in g["rules"]
    ]
    changed = {"groups": [{"name": "spd", "rules": rules}]}
    code, output = unit_tests(tmp_path, yaml.safe_dump(changed))
    assert code == 1
    # promtool prints the cases that went wrong.
    wanted = r"\[\]" if expression == "vector(1)" else r"\[\s+0:"
    wrong = set(re.findall(rf"alertname: (\w+), time: \w+, \n +exp:{wanted}", output))
    assert wrong == set(ALERTS), output


def test_each_alert_is_explained() -> None:
    explained = re.findall(r"^\| `(Spd\w+)` \|", (ROOT / "docs" / "metrics.md").read_text(), re.M)
    assert explained == ALERTS


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    asked = {n for _, expr in expressions(DASHBOARD) for n in re.findall(r"ray_\w+", expr)}
    assert asked <= NAMES
    unseen = {
        metric.name
        for metric in METRICS
        if metric.origin != "page" and not asked & (metric.series | {metric.exported})
    }
    # The first of these is the second, and the third the accepted drafts.
    assert unseen == {"spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens_per_pos"}


def test_the_dashboards_form() -> None:
    """What Grafana would show in a wrong place, or from a wrong source."""
    board = json.loads(DASHBOARD.read_text())
    variables = {v["name"]: v for v in board["templating"]["list"]}
    assert list(variables) == ["datasource", "job", "model_name", "replica"]
    rows = [p["title"] for p in board["panels"] if p["type"] == "row"]
    assert rows == ["Overview", "Latency", "Speculation", "Pipeline"]
    panels = [p for p in board["panels"] if p["type"] != "row"]
    assert len({p["id"] for p in board["panels"]}) == len(board["panels"])
    places: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24
        assert not cells & places, panel["title"]
        places |= cells
    for panel in panels:
        assert panel["description"], panel["title"]
        assert panel["fieldConfig"]["defaults"]["noValue"] == "no traffic"
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
            selectors = re.findall(r"ray_\w+(\{[^}]*\})?", target["expr"])
            assert all('job=~"$job"' in s and 'model_name=~"$model_name"' in s for s in selectors)
            # 0 / 0 is no figure, and no line either.
            assert not re.search(r"/ \(?sum [^>]*$", target["expr"]), target["expr"]
