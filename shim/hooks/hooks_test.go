package hooks

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
)

func shell(script string) specs.Hook {
	return specs.Hook{Path: "/bin/sh", Args: []string{"sh", "-c", script}}
}

func TestRun(t *testing.T) {
	out := filepath.Join(t.TempDir(), "out")
	t.Setenv("CUBE_SECRET", "x")
	bundle := t.TempDir()
	h := shell("cat > " + out + "; env >> " + out + "; pwd >> " + out)
	h.Env = []string{"A=b"}
	if err := Run(t.Context(), "poststart", []specs.Hook{h}, specs.State{ID: "box", Pid: 7, Bundle: bundle}); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	if s := string(b); !strings.Contains(s, `"id":"box"`) || !strings.Contains(s, `"pid":7`) || !strings.Contains(s, "A=b") || !strings.HasSuffix(s, bundle+"\n") || strings.Contains(s, "SECRET") {
		t.Errorf("hook got %s", s)
	}
}

func TestFailureEndsIt(t *testing.T) {
	out := filepath.Join(t.TempDir(), "out")
	err := Run(t.Context(), "prestart", []specs.Hook{shell("echo no such thing >&2; exit 3"), shell("touch " + out)}, specs.State{})
	if err == nil || !strings.Contains(err.Error(), "prestart hook /bin/sh") || !strings.Contains(err.Error(), "no such thing") {
		t.Errorf("error %v", err)
	}
	if _, err := os.Stat(out); err == nil {
		t.Error("the second one ran")
	}
}

func TestTimeout(t *testing.T) {
	one := 1
	h := shell("exec sleep 100")
	h.Timeout = &one
	began := time.Now()
	err := Run(t.Context(), "prestart", []specs.Hook{h}, specs.State{})
	if err == nil || !strings.Contains(err.Error(), "not finished in 1s") {
		t.Errorf("error %v", err)
	}
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("took %s", took)
	}
}

// TestDaemon: a hook that leaves something behind with its output open is done when it itself is.
func TestDaemon(t *testing.T) {
	began := time.Now()
	if err := Run(t.Context(), "prestart", []specs.Hook{shell("sleep 6 & exit 0")}, specs.State{}); err != nil {
		t.Error(err)
	}
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("took %s", took)
	}
}

func TestMissing(t *testing.T) {
	err := Run(t.Context(), "poststop", []specs.Hook{{Path: "/no/such/hook"}}, specs.State{})
	if err == nil || !strings.Contains(err.Error(), "/no/such/hook") {
		t.Errorf("error %v", err)
	}
}
