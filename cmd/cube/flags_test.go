package main

import (
	"strings"
	"testing"
)

func TestFlagsFirst(t *testing.T) {
	for line, want := range map[string]string{
		"":                                "",
		"clone a -n 3":                    "clone -n 3 a",
		"clone -n 3 a":                    "clone -n 3 a",
		"clone a --number=3":              "clone --number=3 a",
		"clone a -n":                      "clone -n a",
		"clone -- -a -n 3":                "clone -- -a -n 3",
		"clone a -- -n 3":                 "clone -- a -n 3",
		"rm a b -f":                       "rm -f a b",
		"ps -aq":                          "ps -aq",
		"logs a -fn 3":                    "logs -fn 3 a",
		"image import - --name x":         "image import --name x -",
		"--config x clone a -n 3":         "--config x clone -n 3 a",
		"--log-level=debug stop a -t 1s":  "--log-level=debug stop -t 1s a",
		"snapshot create a --name b":      "snapshot create --name b a",
		"run -d image ls -l":              "run -d image ls -l",
		"ssh -t a ls -l":                  "ssh -t a ls -l",
		"exec -i a ls -l":                 "exec -i a ls -l",
		"network policy set a --deny 1/8": "network policy set --deny 1/8 a",
		"nothing a -n 3":                  "nothing a -n 3",
	} {
		got := flagsFirst(newApp(), append([]string{"cube"}, strings.Fields(line)...))
		if strings.Join(got[1:], " ") != want {
			t.Errorf("%s: %q", line, got)
		}
	}
}
