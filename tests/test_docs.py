"""Every Python block of the documents runs, and the counterexample shows what it says."""

import re
import runpy
from pathlib import Path

import pytest

import lap2

ROOT = Path(__file__).parent.parent
THEORY = ROOT / "docs" / "theory.md"
DOCUMENTS = sorted({THEORY, *ROOT.glob("README.md"), *ROOT.glob("docs/*.md")})
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_blocks_run_one_after_another_and_print_what_is_shown(path, monkeypatch, tmp_path, capsys):
    text = path.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": path.stem}
    for block in BLOCK.finditer(text):
        above = "\n" * text.count("\n", 0, block.start(1))  # so that tracebacks name the line
        exec(compile(above + block[1], str(path), "exec"), namespace)
    shown = {line.strip() for line in text.splitlines()}
    assert {line.strip() for line in capsys.readouterr().out.splitlines()} <= shown


def test_theory_has_the_sections_that_docstrings_cite_and_code_in_them():
    text = THEORY.read_text(encoding="utf-8")
    assert re.findall(r"^## (\d+)\. ", text, re.MULTILINE) == [str(n) for n in range(1, 13)]
    assert "**Theorem 1 " in text
    assert len(BLOCK.findall(text)) == text.count("```python")


def test_counterexample_refutes_the_published_bound_but_not_the_exact_one(capsys):
    example = runpy.run_path(str(ROOT / "examples" / "published_bound_counterexample.py"))
    published, surely_exceeded = example["main"]()
    exact = lap2.Accountant().compose(lap2.Laplace(0.3, 100), sampling_prob=0.01).get_epsilon(1e-5)
    assert published == pytest.approx(0.32, abs=0.005)
    assert 5 * published < surely_exceeded < exact
    assert "times the claim" in capsys.readouterr().out
