# make demo      run the shipped workflows in a real ComfyUI, write a picture and a clip, print the table
# make comfyui   leave that ComfyUI open in the browser
# make test      lint, then all tests           make lint   the first half of it
# make benchmark the figures of the README      make venv   only the set-up that all of these share
#
# COMFYUI_DIR=/path        use an existing ComfyUI for demo, comfyui and the host tests (nothing in it is changed)
# COMFYUI_PYTHON=/path     the Python that runs it, if it is in none of the usual places
# PYTHON=python3.12        the Python that .venv is made from
# TORCH="torch==2.13.0"    what pip is asked for; further pip options are allowed here
SHELL := bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH ?= torch==2.13.0
PORT ?= 8188
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install -qq --disable-pip-version-check
COMFY := bash tools/run_comfy.sh

# An existing ComfyUI has all that the pack needs; without one, ours is installed.
ifdef COMFYUI_DIR
HOST_READY :=
else
HOST_READY := comfy
endif

.PHONY: venv comfy demo comfyui test lint benchmark
.DEFAULT_GOAL := demo

venv: $(VENV)/.ready comfy

$(VENV)/.ready: requirements-dev.txt
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "Installing PyTorch and the tools into $(VENV) ..."
	@$(PIP) $(TORCH)
	@$(PIP) -r requirements-dev.txt
	@touch $@

comfy: .comfy/.ready

.comfy/.ready: $(VENV)/.ready tools/run_comfy.sh
	@echo "Installing ComfyUI into .comfy ..."
	@env -u COMFYUI_DIR -u COMFYUI_PYTHON $(COMFY) install
	@touch $@

demo: $(HOST_READY)
	@python=$$($(COMFY) python) && "$$python" tools/demo.py

comfyui: $(HOST_READY)
	@url=$$(PORT=$(PORT) $(COMFY) start) && echo "ComfyUI runs at $$url (tools/run_comfy.sh stop ends it)." && \
	if [ "$$(uname)" = Darwin ] || [ -n "$$DISPLAY$$WAYLAND_DISPLAY" ]; then $(PYTHON) -m webbrowser "$$url"; fi

# One thread a process: models of tests are small, and on a busy machine threads that wait for each other halve the speed.
# Tests of the host wait for a page half of their time: two hosts side by side, each for whole files.
test: export OMP_NUM_THREADS := 1
test: lint $(HOST_READY)
	@status=0; $(PY) -m pytest tests --ignore=tests/host -n auto || status=1; \
	$(PY) -m pytest tests/host -n 2 --dist loadfile && exit $$status

lint: $(VENV)/.ready
	$(PY) -m ruff check .
	$(PY) tools/lint_rules.py

benchmark: $(VENV)/.ready
	@mkdir -p out
	$(PY) tools/benchmark.py --suite steps --json out/benchmark.json
