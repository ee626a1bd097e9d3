"""The suite of benchmarks without its models: selection, turns, failures, ratios, verdicts, pages."""

import json
import re
import sys
import textwrap
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(FOLDER))

import _harness  # noqa: E402
import _pages  # noqa: E402
import _report  # noqa: E402
import _rows  # noqa: E402
import _small_models  # noqa: E402
import peers  # noqa: E402
import workloads  # noqa: E402
from _rows import FIRST_COLD, FIRST_WARM, PEAK, Case, Claim, Point, Row  # noqa: E402

import gpu  # noqa: E402

OURS, THEIRS = Case("unisono", "mlp", 2), Case("DataParallel", "mlp", 2)


def claim(measure="fit", limit=1.5, ours=OURS, theirs=THEIRS):
    return Claim(Point(ours, measure), Point(theirs, measure), limit)


def row(*claims, name="mlp-2-devices"):
    return Row(name, "fit, MLP, 2 devices", claims)


def result(measure="fit", ratio=1.7, limit=1.5, verdict="reached", **more):
    values = {"ours": [3.0, 4.0], "theirs": [2.0, 2.0], "ratio": ratio, "low": 1.5, "high": 2.0}
    values |= {"row": "mlp-2-devices", "what": "fit, MLP, 2 devices", "against": "DataParallel"}
    at_most = measure in (FIRST_COLD, FIRST_WARM, PEAK)
    values |= {"measure": measure, "limit": limit, "at_most": at_most, "verdict": verdict}
    return values | {"measured_at": "2026-01-01 10:00"} | more


class Pretended:
    """Stands in for the processes of a case: 100 rows a second, or 50 of others than Unisono's."""

    log = []
    failing = {}

    def __init__(self, case, folder, cache):
        self.case, self.cache = case, cache
        self.log.append((str(case), "start", cache and cache.name))

    def first_step(self, left=None):
        if self.failing.get(self.case) == "start":
            raise _harness.CaseFailedError(f"{self.case}: process 0 ended with 1\n  [0] its last words")
        return 2.0

    def turn(self, action, left=None):
        self.log.append((str(self.case), action, None))
        if self.failing.get(self.case) == action:
            raise _harness.CaseFailedError(f"{self.case}: no answer in time\n")
        return {"seconds": 1.0 if "unisono" in self.case.peer else 2.0, "rows": 100, "peak": 7}

    def close(self):
        self.log.append((str(self.case), "close", None))


@pytest.fixture
def pretended(monkeypatch):
    monkeypatch.setattr(Pretended, "log", [])
    monkeypatch.setattr(Pretended, "failing", {})
    return Pretended


def test_rows_have_names_of_their_own_and_known_peers_and_workloads():
    names = [r.name for r in _rows.ROWS]
    assert len(names) == len(set(names))
    for cases in _harness.points_of(_rows.ROWS).values():
        for case in cases:
            assert case.peer in peers.PEERS
            assert case.workload in workloads.WORKLOADS


def test_all_rows_but_those_by_name_are_selected():
    assert {r.name for r in _rows.ROWS} - {r.name for r in _rows.selected()} == {
        "lstm-2-processes",
        "deep300-first-step-2-devices",
        "deep300-memory-2-devices",
        "mlp-fully-sharded-2-processes",
        "cnn3-fully-sharded-2-processes",
        "resnet-fully-sharded-2-processes",
        "transformer-fully-sharded-2-processes",
    }


def test_rows_are_selected_by_name_and_pattern():
    assert [r.name for r in _rows.selected(["lstm-2-processes", "mlp-loop"])] == [
        "lstm-2-processes",
        "mlp-loop",
    ]
    assert {r.name.split("-")[0] for r in _rows.selected(["mlp-*"])} == {"mlp"}
    assert {r.name for r in _rows.selected(quick=True)} == set(_rows.QUICK)


def test_an_unknown_row_is_an_error():
    with pytest.raises(ValueError, match=r"see --list. Received: 'mlq'"):
        _rows.selected(["mlp-loop", "mlq"])


def test_a_case_reads_well():
    assert str(Case("torch DDP", "mlp", 1, 2)) == "torch DDP, mlp, 2 processes"
    assert str(OURS) == "unisono, mlp, 2 devices"
    assert str(Case("plain Keras", "cnn")) == "plain Keras, cnn, 1 device"


def test_cases_of_a_workload_take_turns(pretended):
    measured = _harness.measure([row(claim())], 2, 1, running=pretended)
    turns = [(case, what) for case, what, _ in pretended.log if what == "fit"]
    first, second = (str(OURS), "fit"), (str(THEIRS), "fit")
    assert turns == [first, second, first, second, first, second]
    assert measured.values[Point(OURS, "fit")] == [100.0, 100.0]
    assert measured.values[Point(THEIRS, "fit")] == [50.0, 50.0]
    assert [what for _, what, _ in pretended.log].count("close") == 2


def test_memory_is_read_after_the_first_epochs_of_fit_alone(pretended):
    rows = [row(claim("evaluate"), claim(PEAK))]
    measured = _harness.measure(rows, 1, 1, running=pretended)
    own = [what for case, what, _ in pretended.log if case == str(OURS)]
    assert own == ["start", "fit", "evaluate", "fit", "evaluate", "close"]
    assert measured.values[Point(OURS, PEAK)] == [7]


def test_a_workload_says_how_many_rounds_it_needs(pretended):
    measured = _harness.measure([row(claim())], None, 1, running=pretended)
    assert len(measured.values[Point(OURS, "fit")]) == workloads.workload("mlp").rounds


def test_first_steps_have_a_cold_and_a_warm_cache(pretended, monkeypatch):
    monkeypatch.setattr(_harness, "read_files", lambda: None)
    rows = [row(claim(FIRST_COLD), claim(FIRST_WARM))]
    measured = _harness.measure(rows, 1, 2, running=pretended)
    caches = [cache for case, what, cache in pretended.log if what == "start" and case == str(OURS)]
    assert caches == ["cache-0-0", "cache-0-0", "cache-0-1", "cache-0-1"]
    assert measured.values[Point(OURS, FIRST_COLD)] == [2.0, 2.0]
    assert measured.values[Point(OURS, FIRST_WARM)] == [2.0, 2.0]


def test_no_cache_where_no_first_step_is_measured(pretended):
    _harness.measure([row(claim())], 1, 1, running=pretended)
    assert {cache for _, _, cache in pretended.log} == {None}


@pytest.mark.parametrize("when", ["start", "fit"])
def test_a_failing_case_ends_alone(pretended, when):
    pretended.failing[THEIRS] = when
    told = []
    measured = _harness.measure([row(claim())], 2, 1, told.append, pretended)
    assert measured.missing[THEIRS].startswith("failed: DataParallel, mlp, 2 devices: ")
    assert any("DataParallel, mlp, 2 devices: " in text for text in told)
    assert len(measured.values[Point(OURS, "fit")]) == 2
    (found,) = _report.results([row(claim())], measured, "now")
    assert found["verdict"].startswith("failed: ")
    assert "ratio" not in found
    assert (str(THEIRS), "close", None) in pretended.log


def test_a_peer_without_its_package_is_not_measured(pretended, monkeypatch):
    monkeypatch.setitem(_harness.NEEDS, "DataParallel", "a_package_that_is_not_there")
    measured = _harness.measure([row(claim())], 1, 1, running=pretended)
    (found,) = _report.results([row(claim())], measured, "now")
    assert found["verdict"] == "not measured: pip install a_package_that_is_not_there"
    assert {case for case, _, _ in pretended.log} == {str(OURS)}


class Timed(Pretended):
    """Takes ten seconds for a start and one for a turn, on a clock of its own, and ends at the limit."""

    now = 0.0

    def spend(self, seconds, left):
        Timed.now += min(seconds, left)
        if seconds > left:
            raise _harness.CaseFailedError(f"{self.case}: no answer in time\n")

    def first_step(self, left=None):
        self.spend(10.0, left)
        return super().first_step()

    def turn(self, action, left=None):
        self.spend(1.0, left)
        return super().turn(action)


@pytest.mark.parametrize(
    ("seconds", "rounds", "missing"),
    [
        (None, [5, 5], []),
        (25.0, [2, 1], []),  # a round that has begun counts for those that had their turn
        (22.5, [], [OURS, THEIRS]),
        (15.0, [4], [THEIRS]),  # no time for another start
        (0.0, [], [OURS, THEIRS]),
    ],
)
def test_a_budget_is_kept_and_what_it_leaves_out_is_named(pretended, monkeypatch, seconds, rounds, missing):
    monkeypatch.setattr(Timed, "now", 0.0)
    monkeypatch.setattr(_harness.time, "monotonic", lambda: Timed.now)
    budget = _harness.Budget(seconds, lambda: Timed.now)
    measured = _harness.measure([row(claim())], 5, 1, running=Timed, budget=budget)
    assert [len(values) for point, values in measured.values.items() if point.measure == "fit"] == rounds
    assert measured.missing == dict.fromkeys(missing, budget.reason() if seconds is not None else "")
    assert seconds is None or Timed.now <= seconds


SERVES = """
    import json, sys
    given = json.loads(sys.argv[1])
    print(json.dumps({"seconds": 1.0 + given["rank"]}), flush=True)
    for line in sys.stdin:
        action = line.strip()
        if action == "die":
            sys.exit("its last words")
        if action == "sleep":
            import time
            time.sleep(60)
        print(json.dumps({"seconds": given["rank"], "rows": 3, "did": action}), flush=True)
"""


@pytest.fixture
def pair(tmp_path):
    (tmp_path / "serve.py").write_text(textwrap.dedent(SERVES))
    command = [sys.executable, str(tmp_path / "serve.py")]
    running = _harness.Running(Case("torch DDP", "mlp", 1, 2), tmp_path, command=command)
    yield running
    running.close()


def test_processes_answer_and_the_slowest_counts(pair):
    assert pair.first_step() == 2.0
    assert pair.turn("fit") == {"seconds": 1, "rows": 3, "did": "fit"}


def test_the_end_of_a_process_is_shown_with_its_last_lines(pair):
    pair.first_step()
    with pytest.raises(_harness.CaseFailedError, match=r"process 0 ended with 1\n  \[0\] its last words"):
        pair.turn("die")


def test_a_process_that_does_not_answer_is_ended(pair, monkeypatch):
    monkeypatch.setattr(_harness, "TURN_LIMIT", 0.1)
    monkeypatch.setattr(_harness, "END_LIMIT", 0.1)
    pair.first_step()
    with pytest.raises(_harness.CaseFailedError, match="torch DDP, mlp, 2 processes: no answer in time"):
        pair.turn("sleep")
    pair.close()
    assert all(process.returncode == -9 for process in pair._processes)


def test_the_environment_is_the_peers_and_not_the_shells(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--something")
    monkeypatch.setenv("TF_CONFIG", "{}")
    alone = _harness.environment(Case("plain Keras", "mlp"), 0, [5], None)
    assert not {"XLA_FLAGS", "TF_CONFIG", "PJRT_NPROC", "JAX_COMPILATION_CACHE_DIR"} & set(alone)
    assert int(_harness.environment(THEIRS, 0, [5], None)["PJRT_NPROC"]) >= 4
    assert _harness.environment(OURS, 0, [5], "folder")["JAX_COMPILATION_CACHE_DIR"] == "folder"
    worker = _harness.environment(Case("unisono", "mlp", 1, 2), 1, [5, 6], None)
    assert json.loads(worker["TF_CONFIG"]) == {
        "cluster": {"worker": ["127.0.0.1:5", "127.0.0.1:6"]},
        "task": {"type": "worker", "index": 1},
    }
    # As `unisono launch` starts workers; the launcher's files do not exist.
    assert {"PJRT_NPROC", "OMP_NUM_THREADS", "GLIBC_TUNABLES"} <= set(worker)
    assert not any(value.startswith("/launch") for value in worker.values())
    assert "PJRT_NPROC" not in _harness.environment(Case("torch DDP", "mlp", 1, 2), 1, [5, 6], None)


def test_ratios_are_those_of_the_rounds():
    assert _report.ratios([2.0, 9.0, 4.0], [1.0, 3.0, 4.0]) == (2.0, 1.0, 3.0)


@pytest.mark.parametrize(
    ("measure", "limit", "ratio", "expected"),
    [
        ("fit", 1.5, 1.5, "reached"),
        ("fit", 1.5, 1.499, "missed"),
        (PEAK, 1.2, 1.2, "reached"),
        (FIRST_WARM, 1.15, 1.151, "missed"),
        ("fit", None, 0.1, "no claim"),
    ],
)
def test_verdicts(measure, limit, ratio, expected):
    assert _report.verdict(ratio, claim(measure, limit)) == expected


def test_results_hold_values_ratio_and_verdict():
    values = {Point(OURS, "fit"): [3.0, 4.0], Point(THEIRS, "fit"): [2.0, 2.0]}
    (found,) = _report.results([row(claim())], _harness.Measured(values, {}), "2026-01-01 10:00")
    assert found == result(ratio=1.75)


def test_peers_are_named_with_what_differs():
    assert _report.against(claim()) == "DataParallel"
    assert _report.against(claim(theirs=Case("plain Keras", "mlp"))) == "plain Keras on 1 device"
    assert _report.against(claim(FIRST_WARM, theirs=Case("plain Keras", "mlp"))) == (
        "plain Keras on 1 device, warm cache"
    )
    assert _report.against(claim(ours=Case("unisono", "mlp", 1, 2))) == "DataParallel on 2 devices"
    assert _report.against(Claim(Point(OURS, "fit, odd batch"), Point(OURS, "fit"), 0.85)) == "batch 128"


def test_the_table_has_units_spread_claims_and_verdicts():
    found = [
        result(),
        result(PEAK, 1.25, 1.2, "missed", ours=[2.0**30], theirs=[2.0**29]),
        result(FIRST_COLD, limit=None, verdict="no claim", ours=[4.26], theirs=[4.0]),
        {k: v for k, v in result(verdict="failed: x").items() if k not in ("ours", "theirs", "ratio")},
    ]
    lines = [[c.strip() for c in line.strip("|").split("|")] for line in _report.table(found).splitlines()]
    assert [[line[0], *line[3:7]] for line in lines[2:]] == [
        ["1.70 (1.50 to 2.00)", "4 rows/s", "2 rows/s", "at least 1.5", "reached"],
        ["1.25", "1,024 MiB", "512 MiB", "at most 1.2", "missed"],
        ["1.70", "4.3 s", "4.0 s", "", "no claim"],
        ["", "", "", "at least 1.5", "failed: x"],
    ]
    assert len({len(line) for line in _report.table(found).splitlines()}) == 1
    assert _report.summary(found) == "1 claims reached, 1 missed, 1 not measured"


def test_reports_are_merged_in_the_tables_order_and_the_later_one_counts():
    facts = {"cpu": "x", "cores": 2, "memory_gib": 8, "versions": {"jax": "1"}}
    later = {"date": "2026-01-02 10:00", "machine": facts, "results": [result(ratio=2.0)]}
    loop = result(row="mlp-loop", measured_at="2026-01-01 09:00")
    earlier = {"date": "2026-01-01 10:00", "machine": facts, "results": [loop, result()]}
    merged = _report.merged([later, earlier])
    assert [(r["row"], r["ratio"]) for r in merged["results"]] == [("mlp-2-devices", 2.0), ("mlp-loop", 1.7)]
    assert _report.heading(merged).startswith("2026-01-01 09:00 to 2026-01-01 10:00: x, 2 cores, 8 GiB.")
    with pytest.raises(ValueError, match="reports of one machine"):
        _report.merged([later, earlier | {"machine": facts | {"cores": 4}}])


def test_the_machine_is_named():
    facts = _report.machine()
    assert facts["cores"] >= 1
    assert facts["memory_gib"] >= 1
    assert facts["cpu"]
    assert facts["versions"]["jax"][0].isdigit()


def test_pages_are_written_between_their_markers_alone(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "docs").mkdir()
    pages = [tmp_path / name for name in ("README.md", "docs/index.md", "docs/performance.md")]
    for page in pages:
        page.write_text("before\n<!-- benchmarks: begin -->\nold\n<!-- benchmarks: end -->\nafter\n")
    facts = {"cpu": "x", "cores": 2, "memory_gib": 8, "versions": {"jax": "1"}}
    report = {"date": "now", "machine": facts, "results": [result(), result(PEAK, 1.1, 1.2)]}
    _pages.write(report, tmp_path)
    first = [page.read_text() for page in pages]
    _pages.write(report, tmp_path)
    assert [page.read_text() for page in pages] == first
    for text in first:
        assert text.startswith("before\n<!-- benchmarks: begin -->\n\n")
        assert "\n2026-01-01 10:00: x" in text
        assert text.endswith("\n\n<!-- benchmarks: end -->\nafter\n")
        assert "old" not in text
    assert "| 1.70 " in first[1]
    # The short chart has lines; brackets are in the table of docs/performance.md.
    assert ["in brackets" in text for text in first] == [False, False, True]
    assert "with lines from the lowest to the highest" in first[0]
    assert "2 claims reached, 0 missed." in first[2]
    assert "mlp-2-devices / DataParallel" in (tmp_path / "docs" / "performance.svg").read_text()
    short = (tmp_path / "docs" / "performance_short.svg").read_text()
    assert ">DataParallel<" in short
    assert ">Unisono 1.70<" in short
    assert not set(re.findall(r"#\w{6}", short)) - {"#7b8794", "#a8b3c1", "#0d9488", "#64748b"}, (
        "no colour of a verdict"
    )


def test_the_short_charts_bars_are_claims_of_the_suite():
    claims = {(row.name, _report.against(claim)) for row in _rows.ROWS for claim in row.claims if claim.limit}
    assert set(_pages.BARS) <= claims


def test_a_page_without_markers_is_an_error(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("text")
    with pytest.raises(ValueError, match="must have the lines"):
        _pages.replace(page, ["x"])


def test_the_chart_turns_all_ratios_so_that_more_is_better():
    assert _pages.advantages(result()) == (1.7, 1.5, 2.0, 1.5)
    assert _pages.advantages(result(PEAK, 0.5, 1.25)) == (2.0, 0.5, 1 / 1.5, 0.8)
    assert _pages.advantages(result(PEAK, 0.5, None))[3] is None


def test_the_documents_have_the_markers():
    for page in ("README.md", "docs/index.md", "docs/performance.md"):
        text = (FOLDER.parent / page).read_text()
        assert text.count("<!-- benchmarks: begin -->") == text.count("<!-- benchmarks: end -->") == 1


@pytest.mark.parametrize(
    ("memory", "is_half", "rows"),
    [
        (81559, True, {"resnet50": 256, "gpt2": 8}),
        (24576, True, {"resnet50": 64, "gpt2": 2}),
        (16384, False, {"resnet50": 16, "gpt2": 1}),
        (0, False, {"resnet50": 16, "gpt2": 1}),
    ],
)
def test_rows_of_a_batch_follow_from_a_gpus_memory(memory, is_half, rows):
    assert {name: gpu.rows_for(name, memory, is_half) for name in gpu.SIZES} == rows


class OnGpus(Pretended):
    """Notes what its process would see."""

    seen = []

    def __init__(self, case, folder, cache):
        environ = _harness.environment(case, 0, [5], cache)
        names = ("CUDA_VISIBLE_DEVICES", "XLA_CLIENT_MEM_FRACTION")
        self.seen.append((case.peer, case.devices, *[environ.get(name) for name in names]))
        super().__init__(case, folder, cache)


@pytest.fixture
def on_gpus(pretended, monkeypatch):
    """Two GPUs, and processes that are not started."""
    found = [gpu.machine.Gpu(i, f"GPU-{i}", "NVIDIA H100", "580.65", 81559, 4, (9, 0)) for i in (0, 1)]
    monkeypatch.setattr(gpu.machine, "gpus", lambda: found)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(OnGpus, "seen", [])
    monkeypatch.setattr(_harness, "read_files", lambda: None)
    measured = _harness.measure
    monkeypatch.setattr(gpu, "measure", lambda *args, budget: measured(*args, OnGpus, budget))
    return OnGpus


def test_gpus_are_measured_alone_and_together(on_gpus, tmp_path):
    on_gpus.failing[Case("DataParallel", "gpt2", 2, 1, "gpu", 8, "mixed_bfloat16")] = "start"
    report, cases = gpu.run("gpu", True, "13", lambda text: None, only="large")
    share = str(gpu.SHARE)
    assert [seen for seen in on_gpus.seen if seen[0] == "unisono"] == [
        ("unisono", 1, "1", share),
        ("unisono", 1, "1", share),
        ("unisono", 2, "1,0", share),
        ("unisono", 2, "1,0", share),
    ]
    assert {peer for peer, *_ in on_gpus.seen} <= set(peers.PEERS)
    assert {r["row"] for r in report["results"]} == {
        f"{name}{what}-{where}"
        for name in ("resnet50", "gpt2")
        for what in ("", "-first-step", "-memory")
        for where in ("1-device", "2-devices")
    }
    limits = {(r["measure"], r["limit"]) for r in report["results"] if "by hand" in r["against"]}
    assert limits == {("fit", 0.98), (FIRST_COLD, 1.15), (PEAK, None)}
    # 256 rows at 100 rows a second, by Unisono; the others have half of its speed.
    lines = [[c.strip() for c in line.strip("|").split("|")] for line in cases.splitlines()]
    assert lines[2][:3] == ["ResNet-50, 1 device, 256 rows each, mixed_bfloat16", "unisono", "2560.00"]
    assert any("DataParallel" in line and "failed: " in line[2] for line in lines if len(line) > 2)
    (tmp_path / "gpu.md").write_text("a\n<!-- benchmarks: begin -->\n<!-- benchmarks: end -->\nz\n")
    _pages.replace(tmp_path / "gpu.md", gpu.paragraphs(report, cases))
    text = (tmp_path / "gpu.md").read_text()
    assert "2 x NVIDIA H100 (80 GiB), driver 580.65, " in text
    assert "nvidia-nccl-cu13 not installed" in text
    assert "claims reached" in text
    assert all(name in workloads.WORKLOADS for name in (*gpu.SIZES, "resnet50-small", "gpt2-small"))


def test_small_models_have_claims_on_gpus_alone(on_gpus, monkeypatch):
    monkeypatch.setattr(_harness, "NEEDS", {})
    report, cases = gpu.run("gpu", True, "13", lambda text: None, only="small")
    found = report["results"]
    limits = {(r["against"], r["limit"]) for r in found if r["row"] == "small-mlp"}
    assert limits == {
        ("plain Keras", 5.0),
        ("plain Keras, 10 steps per execution", 1.5),
        ("plain Keras, 32 steps per execution", 1.5),
        ("torch eager", 5.0),
        ("torch.compile", None),
    }
    # 64 rows at 100 rows a second; plain Keras has half of its speed, with any number of steps.
    steps = {r["row"]: (r["ours"], r["limit"], r["verdict"]) for r in found if r["measure"] == _rows.STEP}
    assert steps["small-transformer-step"] == ([640.0, 640.0], 0.4, "missed")
    lines = [[c.strip() for c in line.strip("|").split("|")] for line in cases.splitlines()]
    assert lines[2][:4] == ["MLP", "unisono", "640.000", "640.000"]
    assert lines[4][1:3] == ["plain Keras, steps_per_execution=1, its best", "1280.000"]
    assert "| 640.000 ms " in _report.table(found)
    assert "at most 0.4 ms" in _report.table(found)
    claims = [c for r in _small_models.rows_of("cpu") for c in r.claims]
    assert {c.limit for c in claims} == {None}
    assert {c.ours.case.workload for c in claims} <= set(workloads.WORKLOADS)
    assert {c.theirs.case.peer for c in claims} <= set(peers.PEERS)


def test_rows_that_a_budget_leaves_out_are_a_sentence(on_gpus):
    on_gpus.failing[Case("plain Keras", "small-cnn", 1, 1, "gpu")] = "start"
    budget = _harness.Budget(0)
    report, cases = gpu.run("gpu", True, "13", lambda text: None, budget, only="small")
    *_, table, _, last = gpu.paragraphs(report, cases, budget)
    assert last.startswith("Left out by the budget of 0 s: `small-mlp`, `small-mlp-evaluate`, ")
    assert "`small-lstm-step`" in last
    assert len(table.splitlines()) == 2
