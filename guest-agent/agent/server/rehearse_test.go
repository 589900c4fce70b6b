package server

import (
	"os"
	"os/exec"
	"runtime"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/cubesandbox/cube/guest-agent/agent/spec"
	"github.com/cubesandbox/cube/guest-agent/api"
)

// After a rehearsal the first container's specification and message are as little work as the second's. That is so once
// in a process, so each way of it has one of its own.
func TestRehearse(t *testing.T) {
	const of = "CUBE_TEST_REHEARSE"
	switch os.Getenv(of) {
	case "":
		for _, what := range []string{"message", "specification"} {
			cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestRehearse$")
			cmd.Env = append(os.Environ(), of+"="+what)
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("%s: %v: %s", what, err, out)
			}
		}
	case "message":
		b := []byte("\x0a\x01x\x1a\x00\x22\x00\x32\x00") // written by hand: an id, and an empty message each of rootfs, stdio, files
		first(t, func() error {
			var r api.CreateContainerRequest
			return proto.Unmarshal(b, &r)
		})
	case "specification":
		b := []byte(`{"process": {"args": ["sh"], "user": {}}, "root": {"path": "x"}, "linux": {"resources": {"memory": {}},
			"namespaces": [{"type": "pid"}, {"type": "mount"}, {"type": "ipc"}]}}`)
		first(t, func() error {
			_, err := spec.Container(b, spec.Guest{Rootfs: "/r", Cgroup: "/c"})
			return err
		})
	}
}

// first compares the work of the first time with that of the second, in allocations.
func first(t *testing.T, do func() error) {
	t.Helper()
	if err := rehearse(); err != nil {
		t.Fatal(err)
	}
	var counts [2]uint64
	for i := range counts {
		before := mallocs()
		if err := do(); err != nil {
			t.Fatal(err)
		}
		counts[i] = mallocs() - before
	}
	if counts[0] > 2*counts[1]+50 {
		t.Errorf("%d allocations the first time, %d the second", counts[0], counts[1])
	}
}

func mallocs() uint64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.Mallocs
}
