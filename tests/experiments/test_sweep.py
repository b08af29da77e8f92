"""Sweeps: every run once, interrupted ones continued, tables and figures from rows."""

import json
import math
import sys
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from lap2.cli import app
from lap2.experiments import reproduce, run, sweep, tables
from lap2.experiments.formats import FormatError
from lap2.experiments.recipe import COLUMNS, load_recipe
from lap2.experiments.reproduce import EXPERIMENTS, Cell, Experiment, Tuning
from lap2.experiments.show import show

TINY = load_recipe("digits", steps=4, evaluations=2, epsilon=8.0)


def job(seed=0, **labels):
    return sweep.Job(replace(TINY, seed=seed), labels)


def finish(jobs, tmp_path, **settings):
    shared = {"workers": 1, "backend": "sequential", "progress": False, **settings}
    return sweep.finish(jobs, tmp_path / "rows.jsonl", folder=tmp_path / "runs", **shared)


def test_what_is_done_is_not_done_again_and_rows_come_in_order(tmp_path, monkeypatch):
    first = finish([job(0, name="a")], tmp_path)
    done = []
    monkeypatch.setattr(sweep, "do", watched(sweep.do, done))
    rows = finish([job(1, name="b"), job(0, name="a"), job(1, name="b")], tmp_path)
    assert [row["labels"]["name"] for row in rows] == ["b", "a", "b"]
    assert [done_job.recipe.seed for done_job in done] == [1]
    assert rows[1] == first[0]
    assert sweep.read_rows(tmp_path / "rows.jsonl") == [first[0], rows[0]]
    assert list((tmp_path / "runs").iterdir()) == []
    assert rows[0]["exact_epsilon"] <= 8
    assert [step for step, _ in rows[0]["curve"]] == [2, 4]


def test_a_run_is_known_again_on_another_processor():
    noise = 11.640529384036233
    keys = [
        sweep.Job(replace(job().recipe, noise_multiplier=value)).key
        for value in (noise, math.nextafter(noise, 99.0), noise * (1 + 1e-6))
    ]
    assert keys[0] == keys[1] != keys[2]


def watched(do, done):
    def doing(what, *others, **settings):
        done.append(what)
        return do(what, *others, **settings)

    return doing


def test_an_interrupted_run_goes_on_from_its_checkpoint(tmp_path, monkeypatch):
    report = run._Run._report

    def interrupted(self):
        report(self)
        if self.step == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run._Run, "_report", interrupted)
        with pytest.raises(KeyboardInterrupt):
            finish([job()], tmp_path)
    assert sweep.read_rows(tmp_path / "rows.jsonl") == []
    resumed = []
    monkeypatch.setattr(run, "resume", watched(run.resume, resumed))
    (row,) = finish([job()], tmp_path)
    assert len(resumed) == 1
    assert (row["steps"], row["lost_steps"]) == (4, 0)


def test_processes_give_the_same_rows(tmp_path):
    rows = finish([job(0), job(1)], tmp_path, workers=2, backend="loky")
    assert [row["recipe"]["seed"] for row in rows] == [0, 1]
    assert len(sweep.read_rows(tmp_path / "rows.jsonl")) == 2


def test_an_engine_that_gives_no_rows_until_the_end_gets_a_few_jobs_at_a_time(
    tmp_path, monkeypatch
):
    backend = "joblib._parallel_backends.SequentialBackend.supports_return_generator"
    monkeypatch.setattr(backend, False)
    seen = []
    monkeypatch.setattr(
        sweep, "do", lambda job, *_: seen.append(written(tmp_path)) or fake_row(job)
    )
    rows = finish([job(seed) for seed in range(4)], tmp_path, workers=2)
    assert [row["key"] for row in rows] == [job(seed).key for seed in range(4)]
    assert seen == [0, 0, 2, 2]


def written(folder):
    return len(sweep.read_rows(folder / "rows.jsonl"))


def fake_row(job):
    return {
        "key": job.key,
        "labels": dict(job.labels),
        "accuracy": 0.5,
        "evaluated_on": "test",
        "noise_multiplier": 1.0,
        "exact_epsilon": 1.5,
        "steps": 4,
        "lost_steps": 0,
        "seconds": 0.1,
        "lap2": "0.1.0",
        "curve": [[4, 0.5]],
        "recipe": job.recipe.asdict(),
    }


def test_an_engine_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray.util.joblib", None)
    with pytest.raises(ImportError, match=r"needs ray\.util\.joblib: python -m pip install 'ray'"):
        finish([job()], tmp_path, backend="ray")


FULL = {"experiment": "figure5", "scale": "full", "dataset": "mnist", "column": "exact",
        "epsilon": "0.88", "phase": "final", "factor": "0.5", "clip": "10"}  # fmt: skip


def changed(name, value, inside=None):
    made = fake_row(job(0, **FULL))
    target = made if inside is None else made[inside]
    if value is None:
        del target[name]
    else:
        target[name] = value
    return json.dumps(made)


def test_a_row_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [fake_row(job(0, **FULL)), fake_row(job(1))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert sweep.read_rows(path) == rows


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"key": ', "it must be JSON"),
        ("", "it must be JSON"),
        ("[" * 10**5, "nested so deep"),
        ("1" * 5000, "integers of at most 18 digits"),
        ("[1]", "exactly the fields key, labels"),
        (changed("key", "a"), "key must be that of the recipe and the labels"),
        (changed("seed", 3, "recipe"), "key must be that of the recipe and the labels"),
        (changed("stepz", 3, "recipe"), "only the fields .*'stepz'"),
        (changed("steps", 0, "recipe"), "steps must be an integer at least 1"),
        (changed("more", 1), "exactly the fields"),
        (changed("accuracy", None), "exactly the fields"),
        (changed("accuracy", 1.5), "accuracy must be a share"),
        (changed("accuracy", 1), "accuracy must be a share, as a float, got 1"),
        (changed("accuracy", float("nan")), "finite numbers only, got NaN"),
        (changed("exact_epsilon", float("inf")), "finite numbers only, got Infinity"),
        (changed("exact_epsilon", -1.0), "exact_epsilon must be a float at least 0"),
        (changed("noise_multiplier", "1.0"), "noise_multiplier must be a float"),
        (changed("steps", True), "steps must be an integer at least 0, got True"),
        (changed("steps", 4.0), "steps must be an integer at least 0, got 4.0"),
        (changed("lost_steps", -1), "lost_steps must be an integer"),
        (changed("evaluated_on", "train"), "evaluated_on must be test or holdout"),
        (changed("curve", [[4, 0.5, 1]]), "curve must be a list"),
        (changed("curve", [[4.0, 0.5]]), "curve must be a list"),
        (changed("lap2", "<script>"), "lap2 must be a version"),
        (changed("dataset", "a|b", "labels"), "labels must be short words"),
        (changed("dataset", "x\n", "labels"), "labels must be short words"),
        (changed("dataset", "x" * 61, "labels"), "labels must be short words"),
        (changed("epsilon", "nan", "labels"), "labels must be short words"),
        (changed("clip", None, "labels"), "those of its experiment among them"),
        (changed("scale", None, "labels"), "those of its experiment among them"),
        (changed("key", "a")[:-1] + ', "key": "b"}', "name every field once"),
    ],
)
def test_what_is_no_row_is_refused_with_the_line_and_the_field(tmp_path, line, words):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(fake_row(job())) + "\n" + line + "\n")
    with pytest.raises(FormatError, match=rf"rows\.jsonl, line 2, must be a row.*{words}"):
        sweep.read_rows(path)


def test_what_is_no_text_is_no_results_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xff")
    with pytest.raises(FormatError, match=r"rows\.jsonl must be text in UTF-8"):
        sweep.read_rows(path)


def test_labels_that_could_not_be_read_again_are_refused_before_anything_starts(tmp_path):
    with pytest.raises(ValueError, match="labels must be short words"):
        finish([job(0, name="a|b")], tmp_path)


def test_keys_tell_runs_apart():
    keys = {job(seed, name=name).key for seed in (0, 1) for name in "ab"}
    assert len(keys) == 4
    assert job(0, name="a").key == job(0, name="a").key


def row(accuracy, column="gaussian", epsilon="0.88", dataset="mnist", **labels):
    words = {"column": column, "epsilon": epsilon, "dataset": dataset, "phase": "final", **labels}
    return {"labels": words, "accuracy": accuracy, "exact_epsilon": 0.44461, "recipe": {"steps": 9},
            "curve": [[10, accuracy - 0.2], [20, accuracy]], "key": str(accuracy)}  # fmt: skip


def test_a_comparison_has_means_errors_and_says_what_was_not_run():
    rows = [row(0.90), row(0.92), row(0.70, "published"), row(0.1, "exact", epsilon="0.13")]
    table = tables.comparison(rows, title="t", dataset="mnist")
    assert table.header[:3] == ("epsilon", "Lap2 in the paper", "Gaussian")
    (first, second) = table.lines
    assert first[:3] == ("0.88", "93.29", "91.00 (1.00; 2 runs)")
    assert first[4] == "70.00 (1 run); exact epsilon 0.445"
    assert second[:6] == ("0.13", "78.96", "not run", "not run", "not run", "10.00 (1 run)")
    assert second[6:] == ("not run", "")
    assert "no guarantee" in table.header[4]
    assert table.markdown().splitlines()[2].startswith("| 0.88 | 93.29 | 91.00")


@pytest.mark.parametrize(
    ("ours", "gaussian", "paper", "said"),
    [
        ([0.89, 0.91], [0.89, 0.91], 90.0, "+0.00 (1.41)"),
        ([0.90, 0.90], [0.90, 0.92], 90.0, "-1.00 (1.00)"),
        ([0.89, 0.90], [0.90, 0.92], 89.0, "-1.50 (1.12), behind"),
        ([0.89, 0.90], [0.88, 0.90], 90.0, "+0.50 (1.12), below the paper"),
        ([0.50, 0.52], [0.90, 0.92], 90.0, "-40.00 (1.41), behind, below the paper"),
        ([0.89], [0.91], None, "-2.00"),
        ([0.89], [0.91, 0.91], None, "-2.00"),
        ([0.89], [], 90.0, "below the paper"),
        ([], [0.9], 90.0, ""),
    ],
)
def test_the_table_says_where_bits_fall_short(ours, gaussian, paper, said):
    assert tables.verdict([row(a) for a in ours], [row(a) for a in gaussian], paper) == said


def test_the_difference_over_all_lines_leaves_out_what_is_half_there():
    def line(dataset, column, *accuracies):
        labels = {"dataset": dataset, "epsilon": "1", "column": column}
        return [row(accuracy, **labels) for accuracy in accuracies]

    rows = [*line("a", "gaussian", 0.90, 0.92), *line("a", "bits", 0.92)]
    rows += [*line("b", "gaussian", 0.90), *line("b", "bits", 0.93), *line("b", "exact", 0.1)]
    rows += line("c", "gaussian", 0.5)
    assert tables.overall(rows).lines == (("2", "+2.00", "1.00"),)
    assert tables.overall(rows[:3]).lines == (("1", "", ""),)


def test_costs_are_counted_for_each_experiment():
    facts = {"experiment": "a", "scale": "full"}
    rows = [{**row(0.9, **facts), "seconds": 1800.0}, {**row(0.8, **facts), "seconds": 3600.0}]
    rows += [{**row(0.9, experiment="b", scale="small"), "seconds": 0.0}]
    rows[0]["labels"]["phase"] = "tune"
    assert tables.costs(rows).lines == (
        ("a (full)", "1", "1", "90"),
        ("b (small)", "0", "1", "0"),
    )


def test_the_standard_error_is_that_of_the_mean():
    mean, error = tables.summary([row(0.5), row(0.6), row(0.7)])
    assert mean == pytest.approx(60)
    assert error == pytest.approx(10 / math.sqrt(3))


def test_steps_to_reach_a_target_are_the_first_of_the_mean_curve():
    rows = [row(0.96), row(0.94), row(0.5, "exact")]
    table = tables.steps_to_reach(rows, (74.0, 95.0, 99.0), title="t", dataset="mnist")
    assert table.lines[0] == ("Gaussian", "10", "20", "never")
    assert table.lines[3][1:] == ("never", "never", "never")
    assert table.lines[1][1:] == ("not run",) * 3


def tiny_experiment(_scale):
    cells = []
    for column in ("gaussian", "bits"):
        changes = COLUMNS[column]
        labels = {"experiment": "table2", "scale": "small", "dataset": "mnist"}
        labels |= {"column": column, "epsilon": "8"}
        recipe = replace(TINY, **changes)
        cells.append(Cell(labels, recipe, seeds=2, tuning=Tuning(labels, recipe, holdout=100)))
    return cells


def test_tuning_never_sees_the_test_set_and_decides_the_rate(tmp_path, monkeypatch):
    monkeypatch.setitem(EXPERIMENTS, "table2", Experiment("tiny", tiny_experiment))
    path = tmp_path / "rows.jsonl"
    final = reproduce.reproduce(
        "table2", path, scale="small", folder=tmp_path, workers=1, backend="sequential",
        progress=False,
    )  # fmt: skip
    rows = sweep.read_rows(path)
    tuned = sweep.select(rows, phase="tune")
    assert {r["evaluated_on"] for r in tuned} == {"holdout"}
    assert {r["evaluated_on"] for r in final} == {"test"}
    assert len(final) == 4
    for column in ("gaussian", "bits"):
        trials = sweep.select(tuned, column=column)
        assert len(trials) == 3  # the same effort for every column
        best = max(trials, key=lambda r: (r["accuracy"], -r["recipe"]["learning_rate"]))
        for r in sweep.select(final, column=column):
            assert r["recipe"]["learning_rate"] == best["recipe"]["learning_rate"]
    shown = show("table2", rows, tmp_path / "figure")
    (line,) = shown.tables[0].lines
    assert [text == "not run" for text in line] == [False, False, True, True, True, False, False]


def test_shortened_tuning_runs_are_the_same_process_in_fewer_steps():
    full = replace(TINY, steps=400)
    tuning = Tuning({}, full, shortened=4, factors=(0.5, 1.0), holdout=100)
    jobs = tuning.jobs()
    assert [j.recipe.steps for j in jobs] == [100, 100]
    assert [j.recipe.learning_rate for j in jobs] == [2.0, 4.0]  # the recipe's is 1
    assert run.noise_of(jobs[0].recipe) == pytest.approx(run.noise_of(full) / 2)
    assert tuning.best([{"accuracy": 0.3}, {"accuracy": 0.3}]) == 0.5
    assert tuning.best([{"accuracy": 0.3}, {"accuracy": 0.4}]) == 1.0


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("scale", ["small", "full"])
def test_cells_are_all_different_and_tuned_with_the_same_effort(name, scale):
    cells = EXPERIMENTS[name].cells(scale)
    assert len({sweep.Job(cell.recipe, cell.labels).key for cell in cells}) == len(cells)
    assert len({cell.tuning and (cell.tuning.factors, cell.tuning.holdout) for cell in cells}) == 1
    for cell in cells:
        assert cell.recipe.epsilon == float(cell.labels["epsilon"])


def test_every_point_of_the_grid_stays_within_its_epsilon():
    import lap2

    for cell in EXPERIMENTS["figure6"].cells("full"):
        recipe = cell.recipe
        rounded = 1 - 5e-7  # more than what the grid of the noise adds to the sensitivity
        step = lap2.Laplace(recipe.noise_multiplier * rounded, 26010)
        accountant = lap2.Accountant().compose(
            step, sampling_prob=recipe.batch_size / 60_000, steps=recipe.steps
        )
        assert accountant.get_epsilon(recipe.delta) <= recipe.epsilon


@pytest.mark.parametrize("name", ["figure5", "figure6", "figure8", "figure10", "figure11"])
def test_every_figure_is_drawn_from_rows(name, tmp_path):
    rows = []
    for index, cell in enumerate(EXPERIMENTS[name].cells("small")):
        words = {**cell.labels, "phase": "final"}
        rows.append({**row(0.8 + index / 1000), "labels": words, "recipe": cell.recipe.asdict()})
    shown = show(name, rows, tmp_path / name)
    assert shown.pictures
    for picture in shown.pictures:
        assert picture.stat().st_size > 10_000


def test_the_command_says_what_is_wrong():
    answer = CliRunner().invoke(app, ["reproduce", "table9"])
    assert answer.exit_code == 2
    assert "name must be one of table2" in answer.output.replace("\n", " ").replace("│ ", "")


def test_pieces_of_a_batch_are_not_part_of_what_a_run_is():
    pieces = sweep.Job(replace(TINY, max_physical_batch_size=64))
    assert pieces.key == job().key
    assert sweep.Job(replace(TINY, batch_size=64)).key != job().key


def test_an_unknown_backend_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(ValueError, match=r"backend must be one of .*loky.*dask"):
        finish([job()], tmp_path, backend="nope")


def test_steps_until_a_target_are_read_off_the_runs_of_table_2(tmp_path, monkeypatch):
    """In the same file, so that none is made twice."""
    monkeypatch.chdir(tmp_path)
    asked = []
    monkeypatch.setattr(reproduce, "reproduce", lambda *args, **_: asked.append(args) or [])
    assert CliRunner().invoke(app, ["reproduce", "figure8"]).exit_code == 0
    assert [path.name for _, path in asked] == ["table2-small.jsonl"]
    cells = EXPERIMENTS["figure8"].cells("small")
    keys = {c.jobs(1.0)[0].key for c in EXPERIMENTS["table2"].cells("small")}
    assert {c.jobs(1.0)[0].key for c in cells} < keys
    assert {c.labels["epsilon"] for c in cells} == {"3.42"}
