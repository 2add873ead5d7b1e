# make demo   shows the whole path at work, from nothing
# make test   passes the tests, from nothing
# make help   lists the rest

PYTHON ?= python3
# A plain `pip install torch` on Linux is the CUDA build of several GB, so without a GPU it comes from PyTorch's own index.
TORCH_INDEX ?= $(shell command -v nvidia-smi >/dev/null 2>&1 || echo https://download.pytorch.org/whl/cpu)
# What a GPU machine with torch, Triton and pytest is likely to lack; see bench/gpu.sh.
WHEELS := anyio attrs cattrs click gguf h11 httpcore idna lsprotocol markdown-it-py mdurl msgspec platformdirs \
	prometheus-client pygls pygments pytest-asyncio rich starlette uvicorn $(shell sed -n 's/^\(tree-sitter[a-z-]*\)==.*/\1/p' constraints.txt)
BIN := .venv/bin
READY := .venv/.ready

.PHONY: help demo test check format settings e2e picture neovim-branch bench wheels weights clean
.DEFAULT_GOAL := help

help:  ## lists the commands
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 12

demo: weights  ## fills real gaps through the real server and shows it in the terminal
	@$(BIN)/python examples/demo.py

test: weights  ## all tests but those that drive an editor
	@$(BIN)/pytest -q

check: $(READY)  ## formatting, lint and types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@if command -v stylua >/dev/null; then stylua --check editors/neovim; \
	else echo "no stylua (npm: @johnnymorganz/stylua-bin): the format of editors/neovim was not checked"; fi
	@if command -v luacheck >/dev/null; then luacheck -q --config editors/neovim/.luacheckrc editors/neovim; \
	else echo "no luacheck (Debian: lua-check): editors/neovim was not linted"; fi
	@if command -v npm >/dev/null; then cd editors/vscode && npm ci --silent && npm run --silent check; \
	else echo "no npm: editors/vscode was not checked"; fi

format: $(READY)  ## formats the Python code
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

settings: $(READY)  ## writes the settings' schemas, tables and manifest anew, from their definition
	@$(BIN)/python -m infill_lsp.reference

e2e: weights  ## drives a real Neovim and a real VS Code (installs both under tests/e2e/.tools)
	@bash tests/e2e/run.sh

picture: weights  ## records the picture of the VS Code extension's README in a real VS Code
	@$(BIN)/python tests/e2e/record.py

neovim-branch:  ## makes the branch `neovim` of editors/neovim alone, as plugin managers want it
	@git subtree split -q --prefix=editors/neovim -b neovim

bench: weights  ## prints the latency table
	@$(BIN)/python -m bench.latency

wheels: $(READY)  ## downloads into wheels/ what bench/gpu.sh needs on a GPU machine without network (12 MB)
	@$(BIN)/pip download --disable-pip-version-check -q --no-deps --only-binary=:all: --python-version 3.12 \
		--platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 -c constraints.txt -d wheels $(WHEELS)

weights: $(READY)  ## fetches the embedded model's weights (93 MB, once)
	@$(BIN)/infill-engine fetch

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed: make PYTHON=python3.11 ..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "this Python cannot make virtual environments: apt-get install python3-venv"; exit 1; }
	@echo "Making .venv (once: about 650 MB to download without a GPU, 2.4 GB on disk)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install --disable-pip-version-check -q -c constraints.txt --no-deps \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	@$(BIN)/pip install --disable-pip-version-check -q -c constraints.txt -e '.[engine,dev]'
	@touch $@

clean:  ## removes .venv and what was built
	rm -rf .venv dist build wheels out editors/vscode/bundled editors/vscode/out editors/vscode/node_modules editors/vscode/*.vsix tests/e2e/.tools
