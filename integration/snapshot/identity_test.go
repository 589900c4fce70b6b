package snapshot

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/oci"

	"github.com/cubesandbox/cube/shim/saved"
)

// revealer says every millisecond, as one line, what it takes the time for, how long it has been there, a random number, and
// what its machine is called and identified by. On a line of its input it sets the clock ten minutes back, and says so.
const revealer = `
import os, select, sys, time
n = 0
while True:
    ready, _, _ = select.select([0], [], [], 0.001)
    if ready and os.read(0, 100):
        time.clock_settime(time.CLOCK_REALTIME, time.time() - 600)
    now, since, random = time.time(), time.monotonic(), os.getrandom(8).hex()
    n += 1
    os.write(1, b"I %.3f %.3f %s %s %s %d\n" % (now, since, random.encode(), os.uname().nodename.encode(), open("/etc/machine-id", "rb").read().strip(), n))
`

// told is a line of the revealer's.
type told struct {
	time                  time.Time
	since                 time.Duration
	random, host, machine string
	n                     int
}

// hear reads a line of the revealer's.
func (b *box) hear() (l told) {
	b.Helper()
	var f []string
	for len(f) != 7 || f[0] != "I" { // but for a line that was cut off
		f = strings.Fields(b.line())
	}
	f = f[1:]
	at, err := strconv.ParseFloat(f[0], 64)
	must(b, err)
	since, err := strconv.ParseFloat(f[1], 64)
	must(b, err)
	n, err := strconv.Atoi(f[5])
	must(b, err)
	return told{time.UnixMilli(int64(at * 1000)), time.Duration(since * float64(time.Second)), f[2], f[3], f[4], n}
}

// isRight sees that it takes the time for what it is.
func (l told) isRight(t *testing.T, who string, early time.Time) {
	t.Helper()
	if l.time.Before(early.Add(-time.Second)) || l.time.After(time.Now().Add(time.Second)) {
		t.Errorf("%s takes the time for %v, which is %v", who, l.time, time.Now())
	}
}

const (
	imageID = "0123456789abcdef0123456789abcdef" // a machine-id that all containers of an image have
	setTime = "CAP_SYS_TIME"
)

// TestIdentity: clones, the container itself once more, and one that was rolled back wake with the right time and random numbers
// of their own, although the clock was wrong when they were saved. Clones have names of their own, what goes on keeps its.
func TestIdentity(t *testing.T) {
	store(t)
	client, ctx := connect(t)
	b := newBox(t, client, ctx, "teller", oci.WithAddedCapabilities([]string{setTime}), oci.WithHostname("teller"),
		oci.WithProcessArgs("sh", "-c", "echo "+imageID+" >/etc/machine-id; exec python3 -c \"$0\"", revealer)).run(ctx, "")
	first := b.hear()
	if first.host != "teller" || first.machine != imageID {
		t.Errorf("the parent is %q, %q", first.host, first.machine)
	}
	first.isRight(t, "the parent", time.Now().Add(-s.Config.Timeout(10*time.Second)))
	fmt.Fprintln(b.in, "back")
	last := first
	for ; time.Since(last.time) < 9*time.Minute; last = b.hear() {
	}
	shim := b.shim(ctx)
	name, err := shim.Save(ctx, "", "")
	must(t, err)
	dir := checkpointOf(t, name, b.id)

	heard := map[string]string{}
	// wakes checks the first line of one that has just been woken, and that no other has said it.
	wakes := func(b *box, who string, began time.Time) told {
		t.Helper()
		l := b.hear()
		if time.Since(l.time) > 5*time.Minute {
			l = b.hear() // what was under way when it was frozen is of the time before
		}
		l.isRight(t, who, began)
		if l.since < last.since || l.since > last.since+s.Config.Timeout(2*time.Minute) {
			t.Errorf("%s has been there for %v, after %v", who, l.since, last.since)
		}
		if also := heard[l.random]; also != "" {
			t.Errorf("%s and %s have one random number, %s", who, also, l.random)
		}
		heard[l.random] = who
		return l
	}
	var ids []string
	for _, clone := range []string{"one", "two", "three"} {
		began := time.Now()
		c := newBox(t, client, ctx, clone, oci.WithHostname("clone-"+clone)).run(ctx, dir)
		l := wakes(c, clone, began)
		if l.host != "clone-"+clone || l.machine == imageID {
			t.Errorf("%s is %q, %q", clone, l.host, l.machine)
		}
		ids = append(ids, l.machine)
		c.end(ctx)
	}
	if ids[0] == ids[1] || ids[1] == ids[2] || ids[0] == ids[2] {
		t.Errorf("machine-ids %q", ids)
	}

	_, err = shim.Rollback(ctx, name)
	must(t, err)
	began := time.Now()
	back := b.hear()
	for n := 0; back.time.Before(began); n++ { // what is left of before
		if n == 20_000 {
			t.Fatalf("put back it takes the time for %v", back.time)
		}
		back = b.hear()
	}
	if back.host != "teller" || back.machine != imageID || heard[back.random] != "" {
		t.Errorf("put back it is %+v", back)
	}
	b.end(ctx)
	began = time.Now()
	b.run(ctx, dir)
	if l := wakes(b, "the one that goes on", began); l.host != "teller" || l.machine != imageID {
		t.Errorf("gone on with it is %q, %q", l.host, l.machine)
	}
	b.end(ctx)
	b.startsAnew(ctx)
}

// checkpointOf makes a checkpoint of a snapshot with that container.
func checkpointOf(t *testing.T, name, id string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	must(t, saved.Checkpoint{Snapshot: name, Container: id}.Write(dir))
	return dir
}

// startsAnew sees that a fresh start puts the container's own machine-id in the place of the image's, each time the same one.
func (b *box) startsAnew(ctx context.Context) {
	b.Helper()
	fresh := containerd.WithNewSpec(oci.WithDefaultPathEnv, oci.WithHostname("teller"), oci.WithProcessArgs("sh", "-c", "cat /etc/machine-id; cat"))
	must(b, b.c.Update(ctx, containerd.UpdateContainerOpts(fresh)))
	var ids []string
	for range 2 {
		b.run(ctx, "")
		ids = append(ids, b.line())
		b.end(ctx)
	}
	if ids[0] == imageID || len(ids[0]) != len(imageID) || ids[0] != ids[1] {
		b.Errorf("%s has the machine-ids %q", b.id, ids)
	}
}
