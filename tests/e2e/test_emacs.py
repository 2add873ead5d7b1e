"""What a person gets in Emacs, whose clients draw no inline completions: the text as an entry of the menu.

Real editor, real client (eglot), real server, real engine process, a fake model.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from journeys import PATIENCE, Engine

pytestmark = pytest.mark.e2e

#: Types, asks for a completion until the engine is there, and saves.
SCRIPT = """
(require 'package)
(package-initialize)
(require 'eglot)
(let ((arguments (cdr command-line-args-left)))
  (setq command-line-args-left nil)
  (pcase-let ((`(,file ,server ,settings ,seconds) arguments))
    (setq eglot-server-programs
          `((python-mode . (,server :initializationOptions ,(json-parse-string settings :object-type 'plist)))))
    (find-file file)
    (apply #'eglot (eglot--guess-contact))
    (goto-char (point-max))
    (insert "total = ")
    (let ((deadline (+ (float-time) (string-to-number seconds)))
          (typed (buffer-string)))
      (while (and (equal (buffer-string) typed) (< (float-time) deadline))
        (accept-process-output nil 0.3)
        (completion-at-point)))
    (princ (format "point %d" (point)))
    (save-buffer)
    (eglot-shutdown (eglot-current-server))))
"""


@pytest.fixture(scope="module")
def emacs() -> str:
    """An Emacs with eglot, which is its own from Emacs 29 on."""
    if (emacs := shutil.which("emacs")) is None:
        pytest.skip("Emacs is missing: apt-get install emacs-nox elpa-eglot")
    probe = [emacs, "--batch", "--eval", "(progn (require 'package) (package-initialize) (require 'eglot))"]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("this Emacs has no eglot: apt-get install elpa-eglot")
    return emacs


def test_a_completion_is_an_entry_of_the_menu(
    emacs: str, engine: Engine, server_command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    engine.answers({"total = ": "price * count"})
    file = tmp_path / "shapes.py"
    file.write_text("price, count = 2, 3\n")
    script = tmp_path / "journey.el"
    script.write_text(SCRIPT)
    settings = json.dumps({"model": engine.model, "deadline": {"automatic": 10_000, "invoked": 10_000}})
    command = [emacs, "--batch", "--load", script, "--", file, server_command, settings, str(60 * PATIENCE)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120 * PATIENCE, check=False)
    assert result.returncode == 0, result.stderr
    assert file.read_bytes() == b"price, count = 2, 3\ntotal = price * count\n"
    assert f"point {len('price, count = 2, 3') + 2 + len('total = price * count')}" in result.stdout
