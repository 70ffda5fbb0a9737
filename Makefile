# Two commands: `make demo` and `make test`. Each installs what it needs into .venv, once.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test test-matrix test-peers test-stress test-large lint wheel clean
demo: $(STAMP)
	$(BIN)/mcrdl bench train --workload moe --preset comm --backends stock,gloo,mpi,auto --ranks 2 --rounds 1

test: $(STAMP)
	$(BIN)/python -m pytest

# Left out of `make test` for their time: every operation in every form (6 min), torch's own tests of torch.distributed
# run on us (4 min), long random programs (6 min), messages above 2 GiB (needs 20 GB of memory).
test-matrix: $(STAMP)
	$(BIN)/python -m pytest -m matrix

test-peers: $(STAMP)
	$(BIN)/python -m pytest -m peers

test-stress: $(STAMP)
	$(BIN)/python -m pytest -m stress

test-large: $(STAMP)
	$(BIN)/python -m pytest -m large

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The wheel, installed into an empty environment without its dependencies' dependencies being ours to hold up.
wheel: $(STAMP)
	.ci/check-wheel $(BIN)/python

NATIVE := $(wildcard deepspeed_mcrdl/backends/native/*)

$(STAMP): setup.cfg pyproject.toml constraints.txt $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10 or newer is needed"; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "Python can't make virtual environments here: apt-get install python3-venv"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV); about half a minute, and 1.1 GB, on a good line."
	PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/pip install --quiet -c constraints.txt "setuptools>=77" wheel
	PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/pip install --quiet --no-build-isolation -c constraints.txt -e ".[dev]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) build dist *.egg-info
