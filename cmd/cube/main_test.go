package main

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/urfave/cli/v2"

	"github.com/cubesandbox/cube/bpf/policy"
	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/orchestrator/doctor"
	"github.com/cubesandbox/cube/orchestrator/sandbox"
)

// configure writes a configuration of directories that don't exist and returns its path.
func configure(t *testing.T) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "config.toml")
	text := "state_dir = '/nonexistent/cube/state'\nrun_dir = '/nonexistent/cube/run'\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv(config.FileEnv, file)
	return file
}

// cube runs a command line and returns its exit code and what it says on stderr.
func cube(t *testing.T, args ...string) (int, string) {
	t.Helper()
	var stderr bytes.Buffer
	code := runApp(t.Context(), newApp(), append([]string{"cube"}, args...), &stderr)
	return code, stderr.String()
}

func TestErrorsAreOneLine(t *testing.T) {
	for _, tc := range []struct {
		args  string
		code  int
		words []string
	}{
		{"bogus", 1, []string{"bogus", "cube --help"}},
		{"--bogus", 1, []string{"bogus"}},
		{"run --bogus x", 1, []string{"bogus", "cube run --help"}},
		{"image bogus", 1, []string{"bogus", "cube image --help"}},
		{"--config /none.toml ps", 1, []string{"/none.toml"}},
		{"--log-level loud ps", 1, []string{"loud", "debug"}},
		{"up now", 1, []string{"no arguments"}},
		{"run", 125, []string{"image"}},
		{"run -d --rm x", 125, []string{"--rm"}},
		{"run -d -i x", 125, []string{"-i"}},
		{"run --cpus 0 x", 125, []string{"--cpus"}},
		{"run --memory lots x", 125, []string{"lots", "512MiB"}},
		{"run --memory 0 x", 125, []string{"--memory"}},
		{"run --annotation x x", 125, []string{"--annotation"}},
		{"run -v /etc x", 125, []string{"--volume", "SOURCE:PATH"}},
		{"run -v /etc:data x", 125, []string{"--volume", "absolute"}},
		{"run -v /etc:/data:often x", 125, []string{"--volume", "ro"}},
		{"run -v /nonexistent/cube:/data x", 125, []string{"--volume", "no such file"}},
		{"run x", 125, []string{"containerd.sock", "cube up"}},
		{"exec x", 125, []string{"cube ps"}},
		{"exec x y", 125, []string{"cube up"}},
		{"ps", 1, []string{"ps:", "cube up"}},
		{"image ls", 1, []string{"image ls:", "cube up"}},
		{"rm x", 1, []string{"cube up"}},
	} {
		t.Run(tc.args, func(t *testing.T) {
			configure(t)
			code, msg := cube(t, strings.Fields(tc.args)...)
			if code != tc.code {
				t.Errorf("code %d, want %d", code, tc.code)
			}
			if !strings.HasPrefix(msg, "cube: ") || strings.Count(msg, "\n") != 1 {
				t.Errorf("not one line of cube's: %q", msg)
			}
			for _, w := range tc.words {
				if !strings.Contains(msg, w) {
					t.Errorf("it doesn't say %q: %s", w, msg)
				}
			}
		})
	}
}

func TestConfigFlagReachesChildren(t *testing.T) {
	file := configure(t)
	t.Chdir(filepath.Dir(file))
	t.Setenv(config.FileEnv, "/none.toml")
	if _, msg := cube(t, "--config", filepath.Base(file), "ps"); !strings.Contains(msg, "/nonexistent/cube/run") {
		t.Errorf("the flag wasn't used: %s", msg)
	}
	if got := os.Getenv(config.FileEnv); got != file {
		t.Errorf("children would read %q, want %q", got, file)
	}
}

// parse runs a run command line up to the request that it makes.
func parse(t *testing.T, line string) (spec sandbox.Spec) {
	t.Helper()
	configure(t)
	app := newApp()
	for _, c := range app.Commands {
		if c.Name == "run" {
			c.Action = func(ctx *cli.Context) (err error) {
				spec, err = runSpec(ctx)
				return err
			}
		}
	}
	if err := app.Run(append([]string{"cube", "run"}, strings.Split(line, " ")...)); err != nil {
		t.Fatal(err)
	}
	return spec
}

func TestRunSpec(t *testing.T) {
	t.Setenv("FROM_HERE", "x")
	empty := ""
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for line, want := range map[string]sandbox.Spec{
		"img": {Image: "img", Process: sandbox.Process{Args: []string{}}},
		"-it img sh -c --rm": {
			Image:   "img",
			Process: sandbox.Process{TTY: true, Args: []string{"sh", "-c", "--rm"}},
		},
		"--name n -e A=1,2 -e FROM_HERE -e NOT_HERE -w /w -u 1:2 --cpus 1.5 -m 1g --disk 20GiB --annotation a=b=c img": {
			ID: "n", Image: "img", CPUs: 1.5, Memory: 1 << 30, Disk: 20 << 30,
			Annotations: map[string]string{"a": "b=c"},
			Process:     sandbox.Process{Args: []string{}, Env: []string{"A=1,2", "FROM_HERE=x"}, Cwd: "/w", User: "1:2"},
		},
		"-v /etc:/host:ro -v .:/here img": {
			Image: "img", Process: sandbox.Process{Args: []string{}},
			Mounts: []sandbox.Mount{{Source: "/etc", Destination: "/host", ReadOnly: true}, {Source: here, Destination: "/here"}},
		},
		"--id n --entrypoint= img x": {ID: "n", Image: "img", Entrypoint: &empty, Process: sandbox.Process{Args: []string{"x"}}},
	} {
		want.Network = &network.Settings{Policy: &policy.Policy{Default: policy.Direct}}
		if got := parse(t, line); !reflect.DeepEqual(got, want) {
			t.Errorf("%s:\n%+v, want\n%+v", line, got, want)
		}
	}
}

func TestExitCodes(t *testing.T) {
	for _, tc := range []struct {
		err  error
		code int
	}{
		{nil, 0},
		{failed(exited(0)), 0},
		{failed(exited(7)), 7},
		{failed(errors.New("x")), 125},
		{errors.New("x"), 1},
	} {
		app := newApp()
		app.Before = nil
		app.Action = func(*cli.Context) error { return tc.err }
		var out bytes.Buffer
		if code := runApp(t.Context(), app, []string{"cube"}, &out); code != tc.code {
			t.Errorf("%v: code %d, want %d", tc.err, code, tc.code)
		}
		if quiet := tc.code == 0 || tc.code == 7; quiet != (out.Len() == 0) {
			t.Errorf("%v: says %q", tc.err, out.String())
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	app := newApp()
	app.Before = nil
	app.Action = func(c *cli.Context) error { return c.Context.Err() }
	var out bytes.Buffer
	if code := runApp(ctx, app, []string{"cube"}, &out); code != 130 || out.String() != "cube: interrupted\n" {
		t.Errorf("code %d, says %q", code, out.String())
	}
}

func TestOneLine(t *testing.T) {
	if got := oneLine("a\n\n  b \r\nc"); got != "a | b | c" {
		t.Errorf("got %q", got)
	}
}

func TestVerdict(t *testing.T) {
	for _, tc := range []struct {
		levels []doctor.Level
		want   string
	}{
		{[]doctor.Level{doctor.OK, doctor.Warn, doctor.Fixed}, ""},
		{[]doctor.Level{doctor.Fail, doctor.OK}, "doctor: 1 finding keeps the stack from working: see the remedies above"},
		{[]doctor.Level{doctor.Left, doctor.Left}, "doctor: 2 things are left that nobody owns: see the remedies above"},
		{[]doctor.Level{doctor.Left, doctor.Fail}, "doctor: 1 finding keeps the stack from working and 1 thing is left that nobody owns: see the remedies above"},
	} {
		var findings []doctor.Finding
		for _, l := range tc.levels {
			findings = append(findings, doctor.Finding{Level: l})
		}
		got := ""
		if err := verdict(findings); err != nil {
			got = err.Error()
		}
		if got != tc.want {
			t.Errorf("%v: %q, want %q", tc.levels, got, tc.want)
		}
	}
}
