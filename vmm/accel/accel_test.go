package accel

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cubesandbox/cube/internal/config"
)

// host makes a judge of an invented host.
func host(t *testing.T, setting string, files map[string]string) *Judge {
	t.Helper()
	dir := t.TempDir()
	files["boot_id"] = "boot-1\n"
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return &Judge{
		setting: setting,
		scale:   func(d time.Duration) time.Duration { return d / 100 },
		file:    filepath.Join(dir, "accelerator.json"),
		log:     slog.Default(),
		device:  filepath.Join(dir, "kvm"),
		pvm:     filepath.Join(dir, "kvm_pvm"),
		cpuinfo: filepath.Join(dir, "cpuinfo"),
		bootID:  filepath.Join(dir, "boot_id"),
	}
}

func neverTry(t *testing.T) func(context.Context) error {
	return func(context.Context) error {
		t.Error("a trial was made")
		return nil
	}
}

func TestWithoutTrial(t *testing.T) {
	const amd = "processor\t: 0\nflags\t\t: fpu svm\n"
	const none = "processor\t: 0\nflags\t\t: fpu vmmcall svmx\nbugs\t\t: svm\n"
	for _, tc := range []struct {
		name, setting string
		files         map[string]string
		kind          Kind
		reason, err   string
	}{
		{"configured tcg", "tcg", map[string]string{"kvm": "", "cpuinfo": amd}, TCG, "configured", ""},
		{"configured kvm", "kvm", map[string]string{"kvm": "", "cpuinfo": amd}, KVM, "configured", ""},
		{"configured kvm without", "kvm", map[string]string{"cpuinfo": amd}, "", "", "set it to auto or tcg"},
		{"no device", "auto", map[string]string{"cpuinfo": amd}, TCG, "there is no", ""},
		{"only pvm", "auto", map[string]string{"kvm": "", "kvm_pvm": "", "cpuinfo": none}, TCG, "only PVM", ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			v, err := host(t, tc.setting, tc.files).Decide(context.Background(), "s", neverTry(t))
			if tc.err != "" {
				if err == nil || !strings.Contains(err.Error(), tc.err) {
					t.Fatalf("got %v, %v", v, err)
				}
				return
			}
			if err != nil || v.Kind != tc.kind || !strings.Contains(v.Reason, tc.reason) {
				t.Fatalf("got %+v, %v", v, err)
			}
		})
	}
}

func TestTrial(t *testing.T) {
	good := map[string]string{"kvm": "", "kvm_pvm": "", "cpuinfo": "flags\t: vmx\n"}
	ctx := context.Background()
	t.Run("succeeds once", func(t *testing.T) {
		j := host(t, "auto", good)
		if _, err := j.Known("s"); !errors.Is(err, ErrUndecided) {
			t.Fatalf("before: %v", err)
		}
		n := 0
		trial := func(context.Context) error { n++; return nil }
		for range 3 {
			if v, err := j.Decide(ctx, "s", trial); err != nil || v.Kind != KVM {
				t.Fatal(v, err)
			}
		}
		if n != 1 {
			t.Fatalf("%d trials", n)
		}
		if _, err := j.Known("another guest"); !errors.Is(err, ErrUndecided) {
			t.Errorf("another guest: %v", err)
		}
		if err := os.WriteFile(j.bootID, []byte("boot-2"), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := j.Known("s"); !errors.Is(err, ErrUndecided) {
			t.Errorf("another boot of the host: %v", err)
		}
	})
	t.Run("fails", func(t *testing.T) {
		j := host(t, "auto", good)
		v, err := j.Decide(ctx, "s", func(context.Context) error { return errors.New("MSR\n0x10a") })
		if err != nil || v.Kind != TCG || !strings.HasSuffix(v.Reason, "MSR 0x10a") {
			t.Fatal(v, err)
		}
		if v, err := j.Decide(ctx, "s", neverTry(t)); err != nil || v.Kind != TCG {
			t.Fatal(v, err)
		}
	})
	t.Run("hangs", func(t *testing.T) {
		j := host(t, "auto", good)
		v, err := j.Decide(ctx, "s", func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() })
		if err != nil || v.Kind != TCG || !strings.Contains(v.Reason, "within 100ms") {
			t.Fatal(v, err)
		}
	})
	t.Run("cut short", func(t *testing.T) {
		j := host(t, "auto", good)
		ctx, cancel := context.WithCancel(ctx)
		if _, err := j.Decide(ctx, "s", func(context.Context) error { cancel(); return ctx.Err() }); !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		if _, err := j.Known("s"); !errors.Is(err, ErrUndecided) {
			t.Fatalf("a trial that was cut short is a verdict: %v", err)
		}
	})
	t.Run("damaged verdict", func(t *testing.T) {
		j := host(t, "auto", good)
		if err := os.WriteFile(j.file, []byte(`{"kind":"xen`), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := j.Known("s"); !errors.Is(err, ErrUndecided) {
			t.Fatal(err)
		}
	})
}

// TestThisHost only shows what the quick look says here; it must not hang.
func TestThisHost(t *testing.T) {
	cfg := config.Default()
	cfg.StateDir = t.TempDir()
	v, err := NewJudge(cfg, slog.Default()).Known("s")
	if err != nil && !errors.Is(err, ErrUndecided) {
		t.Fatal(err)
	}
	t.Logf("%+v %v", v, err)
}
