package templates

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/orchestrator/admission"
	"github.com/cubesandbox/cube/orchestrator/db"
	"github.com/cubesandbox/cube/orchestrator/guests"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
	"github.com/cubesandbox/cube/orchestrator/machines"
	"github.com/cubesandbox/cube/orchestrator/sandbox"
	"github.com/cubesandbox/cube/orchestrator/templates"
)

const (
	team = "default"
	// limit bounds a build, or a command.
	limit = 3 * time.Minute
	sum   = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
)

// kitchen has what templates are made with.
type kitchen struct {
	*testing.T
	cfg      *config.Config
	machines *machines.Machines
	guests   *guests.Guests
	builder  *templates.Builder
	log      []string // what the last build has told, "STEP MESSAGE"
}

func newKitchen(t *testing.T) *kitchen {
	cfg, err := config.Load("")
	must(t, err)
	cfg.Templates.ReadyTimeout = config.Duration(5 * time.Second)
	c, err := sandbox.Connect(t.Context(), cfg)
	must(t, err)
	t.Cleanup(func() { c.Close() })
	d, err := db.Open(t.Context(), filepath.Join(t.TempDir(), "db"))
	must(t, err)
	t.Cleanup(func() { d.Close() })
	_, err = d.CreateKey(t.Context(), team)
	must(t, err)
	k := &kitchen{T: t, cfg: cfg, machines: machines.New(cfg, c, slog.New(slog.DiscardHandler)), guests: guests.New(cfg.Timeout)}
	k.builder = &templates.Builder{Config: cfg, Machines: k.machines, Guests: k.guests, Layers: d, Room: k, Log: slog.New(slog.DiscardHandler), Version: "test"}
	t.Cleanup(func() {
		must(t, k.builder.Purge(context.Background(), team))
		all, err := k.machines.All(context.Background())
		if err != nil || len(all) > 0 {
			t.Errorf("machines that are left: %v, %v", all, err)
		}
	})
	return k
}

// AdmitBuild has room for everything.
func (k *kitchen) AdmitBuild(context.Context, admission.Shape) (done func(), err error) {
	return func() {}, nil
}

// Open has the files of the one COPY that there is.
func (k *kitchen) Open(context.Context, string, string) (io.ReadCloser, error) {
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	w := tar.NewWriter(z)
	for _, h := range []*tar.Header{
		{Name: "src/", Typeflag: tar.TypeDir, Mode: 0o755}, {Name: "src/run.sh", Typeflag: tar.TypeReg, Mode: 0o755, Size: 3 << 20}, {Name: "src/link", Typeflag: tar.TypeSymlink, Linkname: "run.sh"},
	} {
		must(k.T, w.WriteHeader(h))
		_, err := w.Write(make([]byte, h.Size))
		must(k.T, err)
	}
	must(k.T, errors.Join(w.Close(), z.Close()))
	return io.NopCloser(&b), nil
}

// make makes a template, which is deleted with the test.
func (k *kitchen) make(r templates.Recipe, name string) (templates.Made, error) {
	k.Helper()
	k.log = nil
	ctx, cancel := context.WithTimeout(k.Context(), k.cfg.Timeout(limit))
	defer cancel()
	began := time.Now()
	made, err := k.builder.Make(ctx, r, k, func(step string, _ lifecycle.Level, message string) { k.log = append(k.log, step+" "+message) }, name)
	k.Logf("%s: %.1f s, %v\n\t%s", name, time.Since(began).Seconds(), err, strings.Join(k.log, "\n\t"))
	if err == nil {
		k.Cleanup(func() { must(k.T, k.machines.Forget(context.Background(), name)) })
	}
	return made, err
}

// told tells whether that was reported.
func (k *kitchen) told(line string) bool { return slices.Contains(k.log, line) }

// says has a sandbox of a template run commands, each of which has to say what it is mapped to.
func (k *kitchen) says(name string, made templates.Made, want [][2]string) {
	k.Helper()
	ctx, cancel := context.WithTimeout(k.Context(), k.cfg.Timeout(limit))
	defer cancel()
	defer func() { must(k.T, k.machines.Kill(context.Background(), name)) }()
	addr, err := k.machines.Create(ctx, lifecycle.Machine{ID: name, Team: team, Snapshot: name, Container: made.Settings.Container})
	must(k.T, err)
	must(k.T, k.guests.Init(ctx, addr, lifecycle.Init{User: made.Settings.User, Workdir: made.Settings.Workdir}))
	for _, w := range want {
		if got, err := k.guests.Run(ctx, addr, "", w[0]); strings.TrimSpace(got) != w[1] {
			k.Errorf("%s: %s says %q, not %q, %v", name, w[0], got, w[1], err)
		}
	}
}

// long has the tests take their time.
var long = os.Getenv("CUBE_TEST_LONG") != ""

const (
	// leaves leaves a process that holds the step's output in a session of its own, and gone fails as long as there is one.
	leaves = "setsid sleep 9876 & true"
	gone   = "! grep -als '98[7]6' /proc/[0-9]*/cmdline"
)

// TestRecipe: steps of every kind, in the image's and in another template's disk, from the cache, and those that fail. The long form
// makes one from the cache as a whole, one that is never ready, and one with a larger disk.
func TestRecipe(t *testing.T) {
	if os.Getenv(inside) == "" {
		t.Skip("SKIPPED: TestSteps runs it")
	}
	k := newKitchen(t)
	r := templates.Recipe{
		Team: team, Image: odd, CPUs: 1, MemoryMB: 256,
		Run: "echo $NEW > ~/started; exec sleep 4321", Ready: "[ -e ~/started ]",
		Steps: []templates.Step{
			{Type: templates.Env, Args: []string{"NEW", "of the ${ODD}"}},
			{Type: templates.Run, Args: []string{`echo "$NEW as $USER in $PWD" | tee /made; id -un user >&2; cp /bin/true /own; chown 12:34 /own; chmod 4711 /own; ` + leaves, "root"}},
			{Type: templates.Workdir, Args: []string{"app"}},
			{Type: templates.Copy, Args: []string{"src", "bin/", "root:12", ""}, Files: sum},
			{Type: templates.User, Args: []string{"root"}},
			{Type: templates.Run, Args: []string{gone}},
		},
	}
	made, err := k.make(r, "first")
	must(t, err)
	if !k.told("2 of the image as root in /home/user") || !k.told("2 user") || !slices.ContainsFunc(k.log, func(l string) bool { return strings.HasPrefix(l, "base made the user user") }) {
		t.Error("it has told something else")
	}
	want := [][2]string{
		{"id -un; pwd; echo $NEW $ODD", "root\n/home/user/app\nof the image image"},
		{"cat /made ~/started", "of the image as root in /home/user\nof the image"},
		{`for p in /proc/[0-9]*; do [ "$(tr '\0' ' ' <$p/cmdline)" != 'sleep 4321 ' ] || echo runs; done; stat -c '%u:%g %a' /own`, "runs\n12:34 4711"},
		{"stat -c '%u:%g %a %s' ~user/app/bin/run.sh; readlink ~user/app/bin/link; stat -c %U ~user/app", "0:12 755 3145728\nrun.sh\nuser"},
		{"cd /odd; stat -c '%n %u:%g %a %h' . suid far link hard; cmp far hard", ". 70001:70002 3775 2\nsuid 12345:42 6755 1\nfar 4294967000:3000000000 604 2\nlink 7:8 777 1\nhard 4294967000:3000000000 604 2"},
		{"cd /odd; stat -c '%F %t:%T %g %a' null disk fifo; grep -c ' / .*nosuid' /proc/mounts", "character special file 1:3 0 666\nblock special file 7:63 6 660\nfifo 0:0 0 620\n0"},
		{attributes, hex.EncodeToString([]byte("yes")) + "\n" + hex.EncodeToString([]byte("yes")) + "\n" + hex.EncodeToString([]byte(raw))},
		{"ls -A /etc/apt; ls -A /etc | grep -Ec '^(debian_version|\\.wh\\.)'", "only\n0"},
	}
	k.says("first", made, want)

	bad := r
	bad.Steps = append(slices.Clone(r.Steps),
		templates.Step{Type: templates.Run, Args: []string{"mv /usr/bin/bash /usr/bin/shell"}},
		templates.Step{Type: templates.Run, Args: []string{`[ "${BASH_VERSION-}" ] || seq 30; echo no good >&2; exit 3`}}) // by sh
	_, err = k.make(bad, "bad")
	var f *templates.Failure
	if !errors.As(err, &f) || f.Step != "8" || f.Err.Error() != "exit status 3" || len(f.Last) != 20 || !slices.Contains(f.Last, "no good") || !k.told("4 CACHED COPY src bin/ root:12") {
		t.Errorf("a step that fails: %v", err)
	}
	larger := made.DiskMB
	if long {
		larger += 1024
	}
	base := &db.Build{ID: "b1", Snapshot: "first", DiskMB: made.DiskMB, Settings: made.Settings}
	on, err := k.make(templates.Recipe{Team: team, Base: base, CPUs: 1, MemoryMB: 256, DiskMB: larger, Steps: []templates.Step{
		{Type: templates.User, Args: []string{"user"}}, {Type: templates.Run, Args: []string{"touch ~/more"}},
	}}, "on")
	must(t, err)
	k.says("on", on, [][2]string{
		{"id -un; echo $NEW; cat /made; ls ~", "user\nof the image\nof the image as root in /home/user\napp\nmore\nstarted"},
		{fmt.Sprintf("stat -c '%%u:%%g %%a' /own; echo $(( $(df --output=size / | tail -1) > (%d << 10) * 9 / 10 ))", larger), "12:34 4711\n1"},
	})
	if !long {
		return
	}

	again, err := k.make(r, "second")
	must(t, err)
	if !k.told("6 CACHED RUN "+gone) || again.Inputs != made.Inputs {
		t.Error("it isn't from the cache")
	}
	k.says("second", again, want[:2])

	bad = r
	bad.Run, bad.Ready = "echo I begin; exec sleep 4322", "echo not yet; exit 7"
	_, err = k.make(bad, "unready")
	if !errors.As(err, &f) || f.Step != "finalize" || !strings.Contains(f.Ready, "exit status 7: not yet") || !slices.Contains(f.Last, "I begin") {
		t.Errorf("what is never ready: %v", err)
	}

	bare := templates.Recipe{Team: team, Base: base, CPUs: 1, MemoryMB: 256, Steps: []templates.Step{{Type: templates.Run, Args: []string{"mv /usr/bin/bash /usr/bin/shell", "root"}}}}
	if _, err = k.make(bare, "bare"); !errors.As(err, &f) || f.Step != "finalize" || !strings.Contains(err.Error(), "there is no /bin/bash") {
		t.Errorf("without bash: %v", err)
	}
	bare.Steps = append(bare.Steps, templates.Step{Type: templates.Run, Args: []string{"mv /usr/bin/shell /usr/bin/bash", "root"}})
	dressed, err := k.make(bare, "dressed")
	must(t, err)
	k.says("dressed", dressed, [][2]string{{"echo here", "here"}})
}

// large is an image with a GiB.
const large = "cube.local/large:1"

// TestLargeImage: what is large arrives as it is.
func TestLargeImage(t *testing.T) {
	if os.Getenv(inside) == "" {
		t.Skip("SKIPPED: TestLarge runs it")
	}
	k := newKitchen(t)
	made, err := k.make(templates.Recipe{Team: team, Image: large, CPUs: 1, MemoryMB: 256, Steps: []templates.Step{{Type: templates.Run, Args: []string{"cp /big/7 /big/copy", "root"}}}}, "large")
	must(t, err)
	sum := os.Getenv("CUBE_TEST_SUM")
	k.says("large", made, [][2]string{{"ls /big | wc -l; stat -c %s /big/* | sort -u; sha256sum /big/7 /big/copy", "9\n134217728\n" + sum + "  /big/7\n" + sum + "  /big/copy"}})
}
