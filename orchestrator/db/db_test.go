package db

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
)

func open(t *testing.T, path string) *DB {
	t.Helper()
	d, err := Open(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

func fresh(t *testing.T) *DB { return open(t, filepath.Join(t.TempDir(), "control", "cube.db")) }

// build makes a team and a template of it with one build, and returns the build.
func build(t *testing.T, d *DB, team, name string) Build {
	t.Helper()
	if _, err := d.CreateKey(t.Context(), team); err != nil {
		t.Fatal(err)
	}
	id := "build-" + team + "-" + name
	b := Build{ID: id, Snapshot: "snap-" + id, CreatedAt: time.Now(), CPUs: 2, MemoryMB: 512, DiskMB: 1024, Settings: Settings{EnvdVersion: "0.6.13", Hook: &Hook{Port: 8080, Path: "/who"}}}
	must(t, d.BeginBuild(t.Context(), b))
	_, err := d.Publish(t.Context(), Publication{Build: id, Team: team, Name: name, Template: "t" + team + name, Tag: DefaultTag, Public: team == DefaultTeam})
	must(t, err)
	b, err = d.Build(t.Context(), id)
	must(t, err)
	return b
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func row(b Build, team, id string) Sandbox {
	now := time.Now().Truncate(time.Microsecond).UTC()
	return Sandbox{ID: id, Team: team, Template: b.Template, Build: b.ID, State: "running", StartedAt: now, Deadline: now.Add(time.Minute),
		Metadata: map[string]string{"k": id, "all": "same"}, Spec: json.RawMessage(`{"a":1}`)}
}

// TestFile: the file is its owner's alone, outlives its process, and what isn't a database of ours is said to be so, and left
// as it is.
func TestFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "control", "cube.db")
	d := open(t, path)
	b := build(t, d, "default", "base")
	must(t, d.AddSandbox(t.Context(), row(b, "default", "i1")))
	for _, p := range []string{path, path + "-wal"} {
		st, err := os.Stat(p)
		must(t, err)
		if st.Mode().Perm() != 0o600 {
			t.Errorf("%s has mode %v", p, st.Mode())
		}
	}
	for pragma, want := range map[string]string{"journal_mode": "wal", "synchronous": "2", "foreign_keys": "1"} {
		var got string
		must(t, d.write.QueryRow("PRAGMA "+pragma).Scan(&got))
		if got != want {
			t.Errorf("%s is %s", pragma, got)
		}
	}
	must(t, d.Close())
	d = open(t, path)
	if s, err := d.Sandbox(t.Context(), "default", "i1"); err != nil || s.Metadata["k"] != "i1" || string(s.Spec) != `{"a":1}` {
		t.Errorf("after another start: %+v, %v", s, err)
	}
	_, err := d.write.Exec("PRAGMA user_version = 99")
	must(t, err)
	must(t, d.Close())
	if _, err := Open(t.Context(), path); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "version 99") {
		t.Errorf("a later version: %v", err)
	}
	for name, damage := range map[string]func([]byte) []byte{
		"not a database":  func([]byte) []byte { return []byte(strings.Repeat("this is none\n", 500)) },
		"a damaged one":   func(b []byte) []byte { copy(b[5000:], strings.Repeat("\xff", 20000)); return b },
		"one cut in half": func(b []byte) []byte { return b[:len(b)/2] },
	} {
		bad := filepath.Join(t.TempDir(), "cube.db")
		good, err := os.ReadFile(path)
		must(t, err)
		content := damage(good)
		must(t, os.WriteFile(bad, content, 0o600))
		if _, err := Open(t.Context(), bad); !errdefs.IsDataLoss(err) || !strings.Contains(err.Error(), bad+" is damaged") || !strings.Contains(err.Error(), "restore a backup") {
			t.Errorf("%s: %v", name, err)
		}
		if after, err := os.ReadFile(bad); err != nil || !slices.Equal(after, content) {
			t.Errorf("%s was changed", name)
		}
	}
}

// TestWrittenIsKept: what a call has written is there whenever the process is killed.
func TestWrittenIsKept(t *testing.T) {
	if path := os.Getenv("DB_TEST_WRITER"); path != "" {
		d := open(t, path)
		b, err := d.Build(t.Context(), "build-default-base")
		must(t, err)
		for i := 0; ; i++ {
			must(t, d.AddSandbox(t.Context(), row(b, "default", fmt.Sprintf("i%d", i))))
			fmt.Println(i)
		}
	}
	path := filepath.Join(t.TempDir(), "cube.db")
	d := open(t, path)
	build(t, d, "default", "base")
	must(t, d.Close())
	self, err := os.Executable()
	must(t, err)
	cmd := exec.CommandContext(t.Context(), self, "-test.run", "^TestWrittenIsKept$", "-test.v")
	cmd.Env = append(os.Environ(), "DB_TEST_WRITER="+path)
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	last := -1
	for last < 20 {
		var line string
		if _, err := fmt.Fscanln(out, &line); err != nil && line == "" && !strings.Contains(err.Error(), "newline") {
			t.Fatal(err)
		}
		fmt.Sscan(line, &last)
	}
	must(t, cmd.Process.Kill())
	_ = cmd.Wait()
	d = open(t, path)
	for i := 0; i <= last; i++ {
		if _, err := d.Sandbox(t.Context(), "default", fmt.Sprintf("i%d", i)); err != nil {
			t.Fatalf("%d of %d: %v", i, last, err)
		}
	}
}
