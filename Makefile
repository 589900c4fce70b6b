# Everything that takes more than a command is in deploy/. As root on Debian 12 with Go, make and git:
# `make run` sets all up and shows a demo, `make test` runs all tests.

.DEFAULT_GOAL := help
SHELL := /bin/bash

# sudo may leave Go out of PATH, and a service no HOME.
export PATH := $(PATH):/usr/local/go/bin:/usr/sbin:/sbin
export HOME ?= /root

# The set-up scripts take turns anyway, and Go's builds use all processors.
.NOTPARALLEL:
.PHONY: help run test test-unit test-long bench build lint generate setup guest kernel up down clean root

help: ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

run: up ## set all up, start the stack, show a demo
	@deploy/demo.sh

test: root setup ## all tests, with the time of each suite
	@deploy/test.sh all

test-unit: ## all tests but integration; what needs a machine is skipped before make setup
	@deploy/test.sh unit

test-long: root setup ## all tests in their long form, with the race detector
	@deploy/test.sh long

bench: root setup ## the benchmarks: the network next to plain forwarding, ctr run of a microVM next to runc, snapshots, E2B's API
	@CGO_ENABLED=0 GOFLAGS='-trimpath -buildvcs=false' go run ./integration/bench

setup: root ## Debian packages, tools, QEMU, guest image, demo image
	@deploy/setup/setup.sh

guest: root ## only the guest image, after a change of the agent
	@deploy/setup/guest.sh

kernel: root ## a small guest kernel of our own, built from Debian's sources; way back: deploy/setup/guest.sh debian
	@deploy/setup/guest.sh small

build: ## Cube's binaries, into bin/
	@deploy/setup/build.sh

lint: ## gofmt, go vet, staticcheck, shellcheck, generated code
	@deploy/setup/packages.sh
	@deploy/setup/tools.sh lint
	@deploy/setup/tools.sh generate
	@deploy/lint.sh

generate: ## code from the agent's protocol, objects of the datapath
	@deploy/setup/packages.sh
	@deploy/setup/tools.sh generate
	@deploy/generate.sh

up: root setup ## start the stack in the background
	@deploy/up.sh

down: root ## stop the stack
	@bin/cube down

clean: ## remove what was built in the tree
	@rm -rf bin

root:
	$(if $(filter-out 0,$(shell id -u)),$(error make $(MAKECMDGOALS) needs root: run sudo make $(MAKECMDGOALS)))
