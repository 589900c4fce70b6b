package filesystem

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/guest-agent/envd/api/filesystem"
	"github.com/cubesandbox/cube/guest-agent/envd/keepalive"
	"github.com/cubesandbox/cube/guest-agent/envd/settings"
	"github.com/cubesandbox/cube/guest-agent/envd/status"
)

// waitTime bounds waits for what takes a moment on an idle machine.
const waitTime = 30 * time.Second

// watcher asks a polled watcher until the event has come.
type watcher struct {
	t    *testing.T
	c    filesystem.FilesystemClient
	id   string
	seen []*filesystem.FilesystemEvent
}

func newWatcher(t *testing.T, c filesystem.FilesystemClient, r *filesystem.CreateWatcherRequest) *watcher {
	t.Helper()
	resp, err := c.CreateWatcher(t.Context(), connect.NewRequest(r))
	must(t, err)
	w := &watcher{t: t, c: c, id: resp.Msg.WatcherId}
	t.Cleanup(w.remove)
	return w
}

func (w *watcher) remove() {
	_, _ = w.c.RemoveWatcher(context.Background(), connect.NewRequest(&filesystem.RemoveWatcherRequest{WatcherId: w.id}))
}

func (w *watcher) get() error {
	r, err := w.c.GetWatcherEvents(context.Background(), connect.NewRequest(&filesystem.GetWatcherEventsRequest{WatcherId: w.id}))
	if err == nil {
		w.seen = append(w.seen, r.Msg.Events...)
	}
	return err
}

func (w *watcher) want(name string, is filesystem.EventType) *filesystem.FilesystemEvent {
	w.t.Helper()
	for deadline := time.Now().Add(waitTime); ; time.Sleep(5 * time.Millisecond) { // clients poll
		must(w.t, w.get())
		for _, e := range w.seen {
			if e.Name == name && e.Type == is {
				return e
			}
		}
		if time.Now().After(deadline) {
			w.t.Fatalf("no %v of %s in %v", is, name, w.seen)
		}
	}
}

func TestWatchers(t *testing.T) {
	c, home := newClient(t)
	must(t, os.MkdirAll(filepath.Join(home, "w/old"), 0o755))
	w := newWatcher(t, c, &filesystem.CreateWatcherRequest{Path: "w", Recursive: true, IncludeEntry: true})
	write(t, filepath.Join(home, "w/old/f"))
	if e := w.want("old/f", filesystem.EventType_EVENT_TYPE_CREATE); e.Entry.GetPath() != filepath.Join(home, "w/old/f") {
		t.Error(e)
	}
	w.want("old/f", filesystem.EventType_EVENT_TYPE_WRITE)
	// What comes with a directory is told of, too, and what comes into it later.
	must(t, os.MkdirAll(filepath.Join(home, "made/deep"), 0o755))
	write(t, filepath.Join(home, "made/deep/f"))
	must(t, os.Rename(filepath.Join(home, "made"), filepath.Join(home, "w/moved")))
	w.want("moved/deep/f", filesystem.EventType_EVENT_TYPE_CREATE)
	write(t, filepath.Join(home, "w/moved/deep/g"))
	w.want("moved/deep/g", filesystem.EventType_EVENT_TYPE_CREATE)
	must(t, os.Rename(filepath.Join(home, "w/moved"), filepath.Join(home, "w/again")))
	w.want("moved", filesystem.EventType_EVENT_TYPE_RENAME)
	w.want("again", filesystem.EventType_EVENT_TYPE_CREATE)
	write(t, filepath.Join(home, "w/again/deep/h"))
	w.want("again/deep/h", filesystem.EventType_EVENT_TYPE_CREATE)
	must(t, os.Remove(filepath.Join(home, "w/old/f")))
	if e := w.want("old/f", filesystem.EventType_EVENT_TYPE_REMOVE); e.Entry != nil {
		t.Error(e)
	}
	must(t, os.RemoveAll(filepath.Join(home, "w")))
	for deadline := time.Now().Add(waitTime); ; time.Sleep(5 * time.Millisecond) {
		if err := w.get(); err != nil {
			wantCode(t, "the end", err, connect.CodeNotFound)
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the watch of a directory that is gone has no end")
		}
	}
	w.remove()
	wantCode(t, "removed", w.get(), connect.CodeNotFound)
}

// Events that nobody asks for don't fill the memory, and their loss is told.
func TestWatcherOverflow(t *testing.T) {
	c, home := newClient(t)
	w := newWatcher(t, c, &filesystem.CreateWatcherRequest{Path: "~"})
	for i := range maxQueued/2 + 1000 {
		must(t, os.Mkdir(filepath.Join(home, fmt.Sprint(i)), 0o755))
		must(t, os.Remove(filepath.Join(home, fmt.Sprint(i))))
	}
	lost := false
	for deadline := time.Now().Add(waitTime); !lost && time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		if err := w.get(); err != nil {
			wantCode(t, "overflow", err, connect.CodeDataLoss)
			lost = true
		}
		if len(w.seen) > maxQueued {
			t.Fatalf("%d events were kept", len(w.seen))
		}
		w.seen = nil
	}
	if !lost {
		t.Fatal("no loss is told")
	}
	// The watch goes on, once what the kernel has kept is through.
	later := filepath.Join(home, "later")
	for deadline := time.Now().Add(waitTime); !slices.ContainsFunc(w.seen, func(e *filesystem.FilesystemEvent) bool { return e.Name == "later" }); time.Sleep(5 * time.Millisecond) {
		if err := w.get(); err != nil {
			wantCode(t, "overflow", err, connect.CodeDataLoss)
		}
		if time.Now().After(deadline) {
			t.Fatal("nothing is told after a loss")
		}
		write(t, later)
	}
}

func TestWatchRefuses(t *testing.T) {
	c, home := newClient(t)
	write(t, filepath.Join(home, "f"))
	for path, code := range map[string]connect.Code{"f": connect.CodeInvalidArgument, "gone": connect.CodeNotFound, "a\x00": connect.CodeInvalidArgument} {
		_, err := c.CreateWatcher(t.Context(), connect.NewRequest(&filesystem.CreateWatcherRequest{Path: path}))
		wantCode(t, path, err, code)
	}
	wantCode(t, "no watcher", (&watcher{c: c, id: "x"}).get(), connect.CodeNotFound)
	// A file system is a network's by its type: all that this machine has can be taken for one.
	var st unix.Statfs_t
	must(t, unix.Statfs(home, &st))
	if _, is := remote[st.Type]; is {
		t.Skip("SKIPPED: the tests are on a network's file system")
	}
	remote[st.Type] = "test"
	defer delete(remote, st.Type)
	_, err := c.CreateWatcher(t.Context(), connect.NewRequest(&filesystem.CreateWatcherRequest{Path: "~"}))
	wantCode(t, "network", err, connect.CodeInvalidArgument)
	newWatcher(t, c, &filesystem.CreateWatcherRequest{Path: "~", AllowNetworkMounts: true})
}

func TestWatchDir(t *testing.T) {
	c, home := newClient(t)
	must(t, os.Mkdir(filepath.Join(home, "w"), 0o755))
	r := connect.NewRequest(&filesystem.WatchDirRequest{Path: "w"})
	r.Header().Set(keepalive.Header, "1")
	ctx, cancel := context.WithTimeout(t.Context(), waitTime)
	defer cancel()
	s, err := c.WatchDir(ctx, r)
	must(t, err)
	var kinds []string
	for s.Receive() {
		switch e := s.Msg().GetEvent().(type) {
		case *filesystem.WatchDirResponse_Start_:
			write(t, filepath.Join(home, "w/f"))
		case *filesystem.WatchDirResponse_Keepalive:
			must(t, os.RemoveAll(filepath.Join(home, "w")))
		case *filesystem.WatchDirResponse_Filesystem:
			kinds = append(kinds, e.Filesystem.Type.String()[len("EVENT_TYPE_"):]+" "+e.Filesystem.Name)
		}
	}
	if got := strings.Join(kinds, ", "); s.Err() != nil || got != "CREATE f, WRITE f, REMOVE f" {
		t.Error(got, s.Err())
	}
}

// In the root of all, paths have one slash.
func TestWatchRoot(t *testing.T) {
	w := &watch{options: options{path: "/", entry: true}, settings: &settings.Store{}}
	events, err := w.translate(fsnotify.Event{Name: "//proc", Op: fsnotify.Create})
	if err != nil || len(events) != 1 || events[0].Name != "proc" || events[0].Entry.GetPath() != "/proc" {
		t.Error(events, err)
	}
}

// Of clients that have gone without a word, watchers don't stay when there are too many.
func TestAbandonedWatchers(t *testing.T) {
	ws := &watchers{}
	stopped := 0
	var ids []string
	for range maxWatchers {
		id, err := ws.add(&polled{stop: func() { stopped++ }})
		must(t, err)
		ids = append(ids, id)
	}
	if _, err := ws.add(&polled{}); connect.CodeOf(status.Connect(err)) != connect.CodeResourceExhausted || stopped != 0 {
		t.Error(err, stopped)
	}
	ws.all[ids[7]].asked = time.Now().Add(-abandoned)
	ws.all[ids[8]].asked = time.Now().Add(-abandoned - time.Minute)
	_, err := ws.add(&polled{})
	if _, there := ws.all[ids[8]]; err != nil || there || stopped != 1 || len(ws.all) != maxWatchers {
		t.Error(err, there, stopped, len(ws.all))
	}
	_, err = ws.get(ids[7], false) // asked for again
	must(t, err)
	if _, err := ws.add(&polled{}); err == nil {
		t.Error("one was ended that is in use")
	}
}
