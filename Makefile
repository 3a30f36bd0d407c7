# `make gate`: do the kernels keep their contract on this machine? `make test`: that, and everything else.
# PYTHON names the interpreter (3.11 to 3.13); ARGS goes to the gate's pytest, paths in it being absolute:
#     make gate ARGS=--csa-kernel=$PWD/mine.py:kernel

PYTHON ?= python3
ARGS ?=

.PHONY: gate test

gate: .venv/bin/tox
	.venv/bin/tox run -e gate -- $(ARGS)

test: .venv/bin/tox
	.venv/bin/tox run -e gate,test,mutants

# An environment of our own, so that a Python whose packages belong to the system does as well.
.venv/bin/tox: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "csa-gate: $(PYTHON) is not Python 3.11, 3.12 or 3.13; name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv .venv || \
	  { echo "csa-gate: $(PYTHON) cannot make virtual environments; install its venv module" \
	         "(Debian, Ubuntu: apt install python3-venv), or name another: make PYTHON=python3.12 ..." >&2; exit 1; }
	.venv/bin/python -m pip install --quiet -c constraints.txt tox
	@touch $@
