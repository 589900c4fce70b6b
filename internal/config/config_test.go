package config

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestLoad(t *testing.T) {
	for _, tc := range []struct {
		name, file, err string
		check           func(*Config) bool
	}{
		{name: "empty", check: func(c *Config) bool {
			return c.RunDir == "/run/cube" && c.ContainerdSocket() == "/run/cube/containerd.sock" && c.VM.Memory == 256<<20
		}},
		{name: "sizes and times", file: "ready_timeout = '90s'\n[vm]\nmemory = '1GiB'\n", check: func(c *Config) bool {
			return time.Duration(c.ReadyTimeout) == 90*time.Second && c.VM.Memory == 1<<30
		}},
		{name: "unknown key", file: "[vm]\nmemori = '1GiB'\n", err: "line 2: unknown key [vm memori]"},
		{name: "syntax", file: "state_dir = \n", err: "line 1"},
		{name: "bad size", file: "[vm]\nmemory = 'lots'\n", err: "is not a size"},
		{name: "accelerator", file: "[vm]\naccelerator = 'xen'\n", err: "must be auto, kvm or tcg"},
		{name: "relative", file: "state_dir = 'x'\n", err: "absolute"},
		{name: "long run dir", file: "run_dir = '/" + strings.Repeat("x", 70) + "'\n", err: "60 bytes"},
		{name: "logs", file: "[logs]\nmax_size = '1MiB'\n", check: func(c *Config) bool { return c.Logs.MaxSize == 1<<20 && c.Logs.MaxFiles == 3 }},
		{name: "small logs", file: "[logs]\nmax_size = '1KiB'\n", err: "logs.max_size"},
		{name: "no logs", file: "[logs]\nmax_files = 0\n", err: "logs.max_files"},
		{name: "uid range", file: "[vm]\nuid_base = 0\n", err: "unprivileged"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := filepath.Join(t.TempDir(), "config.toml")
			if err := os.WriteFile(f, []byte(tc.file), 0o600); err != nil {
				t.Fatal(err)
			}
			c, err := Load(f)
			switch {
			case tc.err == "" && err != nil:
				t.Fatal(err)
			case tc.err == "" && !tc.check(c):
				t.Fatalf("unexpected %+v", c)
			case tc.err != "" && (err == nil || !strings.Contains(err.Error(), tc.err)):
				t.Fatalf("got %v, want %q", err, tc.err)
			}
		})
	}
}

func TestLoadMissingFileThatWasNamed(t *testing.T) {
	if _, err := Load("/nonexistent/config.toml"); err == nil {
		t.Fatal("a missing file that was named must be an error")
	}
}
