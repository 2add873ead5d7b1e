"""The table and the plot of training runs."""

from __future__ import annotations

import json

import pytest

from bench.training import main, measurements, plot, rows


def log(folder, steps, dense=2.0):
    folder.mkdir()
    path = folder / "log.jsonl"
    facts = [{"what": "start", "config": {}}, {"what": "train", "step": 1}]
    facts += [
        {"what": "held", "step": step, "seconds": 60.0 * step, "predictions": 30_000 * step, "dense": dense - step / 10}
        for step in steps
    ]
    path.write_text("\n".join(map(json.dumps, facts)))
    return path


def test_what_was_trained_again_counts_once(tmp_path):
    found = measurements(log(tmp_path / "run", [0, 1, 2, 3, 2, 4]))
    assert [one["step"] for one in found] == [0, 1, 2, 4]


def test_a_table_has_a_line_a_measurement(tmp_path):
    header, *lines = rows({"run": measurements(log(tmp_path / "run", [0, 2]))})
    assert [line[header.index("steps")] for line in lines] == ["0", "2"]
    assert [line[header.index("known, nats")] for line in lines] == ["2.000", "1.800"]
    assert [line[header.index("END, right")] for line in lines] == ["", ""]


def test_a_plot_draws_each_run_that_learned_something(tmp_path):
    runs = {name: measurements(log(tmp_path / name, [0, 1, 2], dense)) for name, dense in (("a", 2.0), ("b", 3.0))}
    for of_run in runs.values():
        for one in of_run:
            one |= {"mask1": 4.0, "mask2": 5.0}
    svg = plot(runs)
    assert svg.count("<polyline") == 6
    assert "a: mask 1" in svg


@pytest.mark.parametrize("content", ["", "no json", json.dumps({"what": "train", "step": 1})])
def test_a_file_that_is_no_log_is_refused(tmp_path, capsys, content):
    path = tmp_path / "log.jsonl"
    path.write_text(content)
    with pytest.raises(SystemExit):
        main([str(path)])
    assert "give the log.jsonl" in capsys.readouterr().err
