# https://just.systems: `just` lists the recipes. Everything also runs without just, from bin/.

_default:
    @just --list

# make .venv with everything (server, vLLM's CPU build, tools)
[group('setup')]
setup:
    bash -c '. bin/_setup && need_venv full'

# run a server (see `just serve --help`)
[group('run')]
serve *args:
    bin/lmcache-shm server {{ args }}

# live view of a running server
[group('run')]
top *args:
    bin/lmcache-shm top {{ args }}

# a real vLLM engine served from the arena
[group('run')]
demo *args:
    bin/demo {{ args }}

# all checks, or: just test fast | unit | e2e
[group('check')]
test *args:
    bin/test {{ args }}

# style, types, import rules
[group('check')]
lint:
    bin/test lint

# rewrite the sources in the project's style
[group('check')]
format:
    .venv/bin/ruff check --fix . ; .venv/bin/ruff format .

# bytes per second of the transfer engine
[group('bench')]
bench *args:
    bin/lmcache-shm bench {{ args }}
