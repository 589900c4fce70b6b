package e2b

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cubesandbox/cube/integration/stack"
	"github.com/cubesandbox/cube/integration/testhost"
	"github.com/cubesandbox/cube/orchestrator/db"
)

// phase is a part of a build, amid which it comes to nothing.
type phase struct {
	name string
	plan map[string]any
	// amid tells whether the build is there.
	amid func(c *client, b built) bool
	// begin has what it needs be there, resume has what was stopped go on, end removes all that; nil is nothing.
	begin, resume, end func(c *client)
}

func (c *client) does(what func(c *client)) {
	if what != nil {
		what(c)
	}
}

// saving tells whether a snapshot is being made.
func saving() bool {
	all, err := filepath.Glob(filepath.Join(s.Config.SnapshotDir(), ".tmp-*"))
	return err == nil && len(all) > 0
}

// inSteps are the phases that need nothing but a machine.
func inSteps() []phase {
	base := func(command string) map[string]any {
		return map[string]any{"fromImage": "cube.local/base:bookworm", "steps": []any{step(command)}}
	}
	return []phase{
		{name: "step", plan: base("echo amid; sleep 2; echo done > /done"), amid: func(c *client, b built) bool { return c.status(b).told("amid") }},
		{name: "layer", plan: base("head -c 64M /dev/urandom > /fill"), amid: func(*client, built) bool { return saving() }},
		{name: "save", plan: serving(), amid: func(*client, built) bool { return saving() }},
		{name: "proof", plan: serving(), amid: func(c *client, b built) bool { return c.status(b).told("saved in") }},
	}
}

// ofImages are the phases before there is a machine: an image comes half from its registry, and is unpacked. cube has to be started
// anew to trust the registry.
func ofImages(t *testing.T) []phase {
	small, heavy := testhost.Server.String()+"/half:1", "cube.local/heavy:1"
	r := newRegistry(t, derived(t, small, 1, 8<<20))
	archive := derived(t, heavy, 16, 16<<20)
	remove := func(image string) func(c *client) {
		return func(c *client) { c.cube(0, "image", "rm", image) }
	}
	return []phase{
		{
			name: "pull", plan: map[string]any{"fromImage": small},
			begin: func(*client) { r.stops() }, resume: func(*client) { r.opens() }, end: remove(small),
			amid: func(*client, built) bool {
				select {
				case <-r.halfs:
					return true
				default:
					return false
				}
			},
		}, {
			name: "unpack", plan: map[string]any{"fromImage": heavy}, end: remove(heavy),
			begin: func(c *client) {
				c.Helper()
				if r := s.Ctr("images", "import", "--local", "--no-unpack", archive); r.Err != nil {
					c.Fatal(r.Err)
				}
			},
			amid: func(*client, built) bool {
				return strings.Contains(s.Ctr("snapshots", "--snapshotter", "cube", "ls").Stdout, "extract-")
			},
		},
	}
}

// derived makes an archive of the demo image with more files.
func derived(t *testing.T, name string, files int, size int64) string {
	t.Helper()
	layer, archive := filepath.Join(t.TempDir(), "layer.tar"), filepath.Join(t.TempDir(), "image.tar")
	if _, err := stack.WriteLayer(layer, "more", files, size, byte(files)); err != nil {
		t.Fatal(err)
	}
	if err := stack.Derive(stack.DemoArchive(), archive, name, layer); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(layer); err != nil {
		t.Fatal(err)
	}
	return archive
}

// TestBuildComesToNothing has a build be canceled, and cube and containerd be killed, amid each of its phases: it is an error that says
// so, or goes on; nothing of it is left, and the next one is ready and can be used. Without CUBE_TEST_LONG it is cube alone, amid a
// step.
func TestBuildComesToNothing(t *testing.T) {
	cube := victims(false)[0]
	if !long() {
		comesToNothing(t, inSteps()[0], cube)
		return
	}
	restart := func() {
		cube.dies(t)
		cube.returns(t)
		newClient(t).serves()
	}
	t.Cleanup(restart) // without the environment that ofImages has made
	phases := append(ofImages(t), inSteps()...)
	restart()
	for _, p := range phases {
		for _, v := range []victim{{name: "cancel"}, cube, victims(true)[1]} {
			t.Run(p.name+"/"+v.name, func(t *testing.T) { comesToNothing(t, p, v) })
		}
	}
}

// comesToNothing ends a build amid a phase, by a victim or, if that isn't a process, by a cancellation.
func comesToNothing(t *testing.T, p phase, v victim) {
	c, team := newTeam(t)
	before := footprint(t)
	c.does(p.begin)
	b := c.build("victim", p.plan)
	s.Eventually(t, 2*time.Minute, "the build to be amid its "+p.name, func() bool {
		if p.amid(c, b) {
			return true
		}
		if st := c.status(b); st.Status == "error" || st.Status == "ready" {
			t.Fatalf("it is over: %+v", st)
		}
		return false
	})
	began := time.Now()
	if v.words == nil {
		c.cube(0, "template", "cancel", b.ID)
	} else {
		v.dies(t)
		c.does(p.resume)
		v.returns(t)
		c.serves()
	}
	st := c.over(b)
	t.Logf("%s after %v: %s: %s", st.Status, time.Since(began).Round(time.Millisecond), st.Reason.Step, st.Reason.Message)
	want := map[string]string{"cancel": "canceled", "cube": "interrupted: cube was stopped"}[v.name]
	switch {
	case st.Status == "ready" && want != "":
		t.Errorf("it is ready")
	case st.Status == "error" && (st.Reason.Message == "" || !strings.HasPrefix(st.Reason.Message, want) || strings.HasPrefix(st.Reason.Message, "internal error")):
		t.Errorf("what is told of it: %+v", st.Reason)
	}
	nothingHalf(t, b, st.Status)

	c.does(p.resume)
	c.ready(c.build("victim", p.plan))
	sb := c.create(map[string]any{"templateID": "victim"})
	c.says(sb, "echo here", "here")
	c.killAll()
	c.cube(0, "team", "purge", team)
	c.does(p.end)
	asBefore(t, before)
}

// nothingHalf sees that of a build that is over no machine is left, nothing that was being saved, pulled or unpacked, and no layer that
// isn't whole.
func nothingHalf(t *testing.T, b built, status string) {
	t.Helper()
	d, err := db.Open(t.Context(), s.Config.DatabaseFile())
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	var odd []string
	defer func() {
		if t.Failed() {
			t.Log(strings.Join(odd, "\n"))
		}
	}()
	s.Eventually(t, time.Minute, "nothing half done", func() bool {
		left := footprint(t)
		odd = slices.DeleteFunc(slices.Clone(left), func(f string) bool {
			half := strings.Contains(f, "template-") || strings.Contains(f, "extract-") || strings.Contains(f, s.Config.SnapshotDir()+"/.tmp-")
			return !half && (status == "ready" || !strings.Contains(f, b.ID))
		})
		odd = append(odd, strings.Split(strings.TrimSpace(s.Ctr("content", "active").Stdout), "\n")[1:]...)
		layers, err := d.Layers(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range layers {
			if at := "file: " + filepath.Join(s.Config.SnapshotDir(), l.Snapshot); !l.Ready || !slices.Contains(left, at) {
				odd = append(odd, "row: layer "+l.Snapshot)
			}
		}
		for _, f := range left {
			name, ok := strings.CutPrefix(f, "file: "+s.Config.SnapshotDir()+"/layer-")
			if ok && !strings.Contains(name, "/") && !slices.ContainsFunc(layers, func(l db.Layer) bool { return l.Snapshot == "layer-"+name }) {
				odd = append(odd, f)
			}
		}
		return len(odd) == 0
	})
}
