package templates

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/orchestrator/db"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
	"github.com/cubesandbox/cube/orchestrator/sandbox"
)

const sum = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

// recipe is one with every kind of step.
func recipe(more ...Step) Recipe {
	return Recipe{Team: team, Image: "debian", CPUs: 1, MemoryMB: 512, Steps: append([]Step{
		{Type: Env, Args: []string{"A", "1", "PATH", "$PATH:/opt"}},
		{Type: Run, Args: []string{"useradd dev", "root"}},
		{Type: User, Args: []string{"dev"}},
		{Type: Workdir, Args: []string{"/app"}},
		{Type: Copy, Args: []string{"src", "x/", "root", "0644"}, Files: sum},
	}, more...)}
}

// files are the uploads of the recipe.
var files = uploads{team + "/" + sum: "tar"}

// disk is what the recipe comes to.
var disk = []string{"docker.io/debian", "useradd dev", "mkdir /app dev", "unpack -user dev -workdir /app -owner root -mode 0644 -- src x/ <tar>"}

// TestMake: every kind of step, and what sandboxes have as theirs then; then the cache, whole and in part.
func TestMake(t *testing.T) {
	w, b := newWorld(t)
	var l told
	made, err := b.Make(within(t), recipe(), files, l.tell, "first")
	must(t, err)
	s := made.Settings
	if s.User != "dev" || s.Workdir != "/app" || s.EnvdVersion != "0.6.13" || made.Digest != "sha256:one" || made.Builder != "test" || made.DiskMB != 10240 || len(made.Inputs) != 64 {
		t.Errorf("%+v", made)
	}
	var c sandbox.Blueprint
	must(t, json.Unmarshal(s.Container, &c))
	if want := []string{"A=1", "LANG=C", "PATH=/bin:/opt"}; !slices.Equal(c.Spec.Process.Env, want) {
		t.Errorf("sandboxes have %q", c.Spec.Process.Env)
	}
	if !slices.Equal(w.kept["first"], disk) {
		t.Errorf("the disk is %q", w.kept["first"])
	}
	if !l.has("2 RUN useradd dev root") || !l.has("2 out of useradd dev") {
		t.Errorf("it tells %q", l.lines)
	}
	if w.begun != 3 || w.left() != 0 { // of the steps, of the template, of the proof
		t.Errorf("%d machines were, %d are left", w.begun, w.left())
	}

	l, w.begun = told{}, 0
	again, err := b.Make(within(t), recipe(), files, l.tell, "second")
	must(t, err)
	if w.begun != 2 || !l.has("5 CACHED COPY src x/ root 0644") || l.has("5 COPY src x/ root 0644") || again.Inputs != made.Inputs || !slices.Equal(w.kept["second"], disk) {
		t.Errorf("from the cache: %d machines, %q, disk %q", w.begun, l.lines, w.kept["second"])
	}

	l = told{}
	_, err = b.Make(within(t), recipe(Step{Type: Run, Args: []string{"more"}}), nil, l.tell, "third")
	must(t, err)
	if want := append(slices.Clone(disk), "more"); !slices.Equal(w.kept["third"], want) || !l.has("5 CACHED COPY src x/ root 0644") {
		t.Errorf("one step more: %q, %q", w.kept["third"], l.lines)
	}

	for name, change := range map[string]func(r *Recipe){
		"all":        func(r *Recipe) { r.Force = true },
		"from COPY":  func(r *Recipe) { r.Steps[4].Force = true },
		"other file": func(r *Recipe) { r.Steps[4].Files = strings.Repeat("1", 64) },
		"other team": func(r *Recipe) { r.Team = "others" },
	} {
		l = told{}
		r := recipe()
		change(&r)
		other := uploads{team + "/" + sum: "tar", team + "/" + strings.Repeat("1", 64): "tar", "others/" + sum: "tar"}
		_, err := b.Make(within(t), r, other, l.tell, name)
		must(t, err)
		if !slices.Equal(w.kept[name], disk) || !l.has("5 COPY src x/ root 0644") || l.has("2 CACHED RUN useradd dev root") != slices.Contains([]string{"from COPY", "other file"}, name) {
			t.Errorf("%s: %q", name, l.lines)
		}
	}
	w.image = "sha256:two" // another one by the same name
	l = told{}
	_, err = b.Make(within(t), recipe(), files, l.tell, "fourth")
	must(t, err)
	if !l.has("2 RUN useradd dev root") {
		t.Errorf("another image: %q", l.lines)
	}
}

// TestFailures: what fails says which step, what, and what it has written; nothing is left but the steps before it.
func TestFailures(t *testing.T) {
	for name, c := range map[string]struct {
		change func(r *Recipe)
		want   Failure
		text   string
	}{
		"command": {func(r *Recipe) { r.Steps = append(r.Steps, Step{Type: Run, Args: []string{"fail it"}}) },
			Failure{Step: "6", What: "fail it"}, "step 6: fail it: exit status 3; the end of its output: line 10 | line 11"},
		"user":    {func(r *Recipe) { r.Steps[2].Args[0] = "nobody" }, Failure{Step: "3", What: "USER nobody"}, "there is no user nobody"},
		"as user": {func(r *Recipe) { r.Steps[1].Args[1] = "nobody" }, Failure{Step: "2", What: "useradd dev"}, "there is no user nobody"},
		"files": {func(r *Recipe) { r.Steps[4].Files = strings.Repeat("2", 64) }, Failure{Step: "5", What: "COPY src x/ root 0644"},
			"were not uploaded"},
		"image": {func(r *Recipe) { r.Image = "absent" }, Failure{Step: "base"}, "the registry doesn't have it"},
		"ready": {func(r *Recipe) { r.Run, r.Ready = "serve", "never" }, Failure{Step: "finalize", What: "serve", Ready: "exit status 7: connection refused"},
			"what runs in it wasn't ready by never within 1s; it isn't ready: exit status 7: connection refused; the end of its output: first | second"},
		"form": {func(r *Recipe) { r.Steps[3].Args = nil }, Failure{Step: "4"}, "WORKDIR takes a directory"},
	} {
		t.Run(name, func(t *testing.T) {
			w, b := newWorld(t)
			b.Config.Templates.ReadyTimeout = config.Duration(time.Second)
			r := recipe()
			c.change(&r)
			_, err := b.Make(within(t), r, files, (&told{}).tell, "failed")
			var f *Failure
			if !errors.As(err, &f) || f.Step != c.want.Step || f.What != c.want.What || f.Ready != c.want.Ready || len(f.Last) > lastLines || !strings.Contains(fmt.Sprint(err), c.text) {
				t.Fatalf("%+v: %v", f, err)
			}
			if w.left() != 0 || w.kept["failed"] != nil {
				t.Errorf("%d machines are left, and the snapshot %q", w.left(), w.kept["failed"])
			}
			all, err := b.Layers.Layers(t.Context())
			must(t, err)
			if len(all) != len(w.kept) || slices.ContainsFunc(all, func(l db.Layer) bool { return !l.Ready }) {
				t.Errorf("layers %+v, disks %q", all, w.kept)
			}
		})
	}
}

// TestHostsOwn: what fails on the host and has no class isn't told to who has asked for the template.
func TestHostsOwn(t *testing.T) {
	w, b := newWorld(t)
	w.broken = errors.New("mount /secret/place: input/output error")
	var f *Failure
	if _, err := b.Make(within(t), recipe(), files, (&told{}).tell, "one"); err == nil || errors.As(err, &f) {
		t.Errorf("%v", err)
	}
	w.broken = errdefs.ErrUnavailable.WithMessage("the store is full")
	if _, err := b.Make(within(t), recipe(), files, (&told{}).tell, "two"); !errors.As(err, &f) || f.Step != stepBase || !errdefs.IsUnavailable(err) {
		t.Errorf("%v", err)
	}
}

// TestProof: what isn't ready in a sandbox of the template only says that it was there.
func TestProof(t *testing.T) {
	w, b := newWorld(t)
	r := recipe()
	r.Run, r.Ready = "serve", "once"
	_, err := b.Make(within(t), r, files, (&told{}).tell, "one")
	var f *Failure
	if !errors.As(err, &f) || f.Step != stepFinal || !strings.Contains(f.Error(), "serve: a sandbox that was made of it: what runs in it wasn't ready") {
		t.Errorf("%v", err)
	}
	if w.left() != 0 || w.kept["one"] != nil {
		t.Errorf("%d machines are left, and the snapshot %q", w.left(), w.kept["one"])
	}
}

// TestGivenUp: a build that is given up amid a command leaves nothing but what was done before.
func TestGivenUp(t *testing.T) {
	w, b := newWorld(t)
	ctx, cancel := context.WithCancel(within(t))
	tell := func(step string, _ lifecycle.Level, _ string) {
		if step == "6" {
			cancel()
		}
	}
	_, err := b.Make(ctx, recipe(Step{Type: Run, Args: []string{"wait"}}), files, tell, "given-up")
	if !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	if all, err := b.Layers.Layers(t.Context()); err != nil || w.left() != 0 || len(all) != 2 || len(w.kept) != 2 {
		t.Errorf("%d machines, layers %+v, disks %q, %v", w.left(), all, w.kept, err)
	}
}

// TestCompletes: an image without a user is given one, once; where that comes too late for the command it begins again.
func TestCompletes(t *testing.T) {
	w, b := newWorld(t)
	w.shells = false
	r := Recipe{Team: team, Image: "alpine", CPUs: 1, MemoryMB: 512, Run: "serve"}
	for i, machines := range []int{3, 2, 2} { // of the completion, of the template, of the proof; then without the first one
		name := fmt.Sprint("t", i)
		if i == 2 {
			r.Run = ""
		}
		w.begun = 0
		made, err := b.Make(within(t), r, nil, (&told{}).tell, name)
		must(t, err)
		if want := []string{"docker.io/alpine", "complete user"}; !slices.Equal(w.kept[name], want) || w.begun != machines || made.Settings.User != DefaultUser {
			t.Errorf("%d: %q after %d machines, %+v", i, w.kept[name], w.begun, made.Settings)
		}
	}
	w.shells, w.noTmp, w.image = true, true, "sha256:bare"
	_, err := b.Make(within(t), Recipe{Team: team, Image: "bare", CPUs: 1, MemoryMB: 512}, nil, (&told{}).tell, "bare")
	must(t, err)
	if want := []string{"docker.io/bare", "complete user"}; !slices.Equal(w.kept["bare"], want) {
		t.Errorf("%q", w.kept["bare"])
	}
	w.shells = false
	r.User = "somebody"
	if _, err := b.Make(within(t), r, nil, (&told{}).tell, "other"); err == nil || !strings.Contains(err.Error(), "step base: there is no user somebody") {
		t.Errorf("another user: %v", err)
	}
}

// TestNoBash: an image without bash has its steps done by sh until one of them has installed it; if none does, it is refused.
func TestNoBash(t *testing.T) {
	w, b := newWorld(t)
	w.shells, w.bare = false, true
	r := Recipe{Team: team, Image: "alpine", CPUs: 1, MemoryMB: 512, Steps: []Step{{Type: Run, Args: []string{"install bash", "root"}}, {Type: Run, Args: []string{"more"}}}}
	_, err := b.Make(within(t), r, nil, (&told{}).tell, "one")
	must(t, err)
	if want := []string{"docker.io/alpine", "complete user", "sh: install bash", "more"}; !slices.Equal(w.kept["one"], want) {
		t.Errorf("the disk is %q", w.kept["one"])
	}
	for i, steps := range [][]Step{nil, {{Type: Run, Args: []string{"something else"}}}} {
		r.Steps = steps
		var f *Failure
		if _, err := b.Make(within(t), r, nil, (&told{}).tell, "two"); !errors.As(err, &f) || !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "there is no /bin/bash") {
			t.Errorf("%d: %v", i, err)
		}
		if w.left() != 0 || w.kept["two"] != nil {
			t.Errorf("%d machines are left, and the snapshot %q", w.left(), w.kept["two"])
		}
	}
}

// TestOnTemplate: a template of another one has its disk, user, directory, variables and commands, where it says nothing else.
func TestOnTemplate(t *testing.T) {
	w, b := newWorld(t)
	r := recipe()
	r.Run, r.Ready, r.Start = "serve", "up", "each"
	made, err := b.Make(within(t), r, files, (&told{}).tell, "one")
	must(t, err)
	base := &db.Build{ID: "b1", Snapshot: "one", DiskMB: made.DiskMB, Settings: made.Settings}
	on := Recipe{Team: team, Base: base, CPUs: 2, MemoryMB: 256, DiskMB: 10, Steps: []Step{{Type: Env, Args: []string{"B", "${A}2"}}, {Type: Run, Args: []string{"more"}}}}
	again, err := b.Make(within(t), on, nil, (&told{}).tell, "two")
	must(t, err)
	s := again.Settings
	if s.User != "dev" || s.Workdir != "/app" || s.Run != "serve" || s.Ready != "up" || s.Start != "each" || again.DiskMB != 10240 || again.Digest != "" || again.Inputs == made.Inputs {
		t.Errorf("%+v", again)
	}
	var c sandbox.Blueprint
	must(t, json.Unmarshal(s.Container, &c))
	if want := []string{"A=1", "B=12", "LANG=C", "PATH=/bin:/opt"}; !slices.Equal(c.Spec.Process.Env, want) || c.Image != "docker.io/debian" {
		t.Errorf("of %s with %q", c.Image, c.Spec.Process.Env)
	}
	if want := append(slices.Clone(disk), "more"); !slices.Equal(w.kept["two"], want) {
		t.Errorf("the disk is %q", w.kept["two"])
	}
	delete(w.kept, "one") // it has been deleted
	on.Force = true
	var f *Failure
	if _, err := b.Make(within(t), on, nil, (&told{}).tell, "three"); !errors.As(err, &f) || f.Step != stepBase || !errdefs.IsNotFound(err) {
		t.Errorf("of one that is gone: %v", err)
	}
	base.Settings.Container = nil
	if _, err := b.Make(within(t), on, nil, (&told{}).tell, "four"); !errdefs.IsDataLoss(err) {
		t.Errorf("of a damaged one: %v", err)
	}
}
