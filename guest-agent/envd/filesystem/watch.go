package filesystem

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/containerd/errdefs"
	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/guest-agent/envd/api/filesystem"
	"github.com/cubesandbox/cube/guest-agent/envd/owned"
	"github.com/cubesandbox/cube/guest-agent/envd/settings"
)

// remote are the file systems whose changes may be made elsewhere, where the kernel here doesn't see them. A FUSE may be one.
var remote = map[int64]string{
	unix.NFS_SUPER_MAGIC: "nfs", unix.SMB_SUPER_MAGIC: "smb", unix.SMB2_SUPER_MAGIC: "smb2", unix.CIFS_SUPER_MAGIC: "cifs",
	unix.V9FS_MAGIC: "9p", unix.CEPH_SUPER_MAGIC: "ceph", unix.AFS_SUPER_MAGIC: "afs", unix.AFS_FS_MAGIC: "afs",
	unix.CODA_SUPER_MAGIC: "coda", unix.NCP_SUPER_MAGIC: "ncp", unix.OCFS2_SUPER_MAGIC: "ocfs2", unix.FUSE_SUPER_MAGIC: "fuse",
}

// options are what is watched, and what is told of it.
type options struct {
	path                           string
	recursive, entry, allowNetwork bool
}

// watch watches a directory. It has an inotify instance of its own: the kernel keeps its events until they are read, and
// drops them when they are too many.
type watch struct {
	options
	settings *settings.Store
	notify   *fsnotify.Watcher
}

func newWatch(s *settings.Store, o options) (*watch, error) {
	if err := checkDir(o.path); err != nil {
		return nil, err
	}
	var st unix.Statfs_t
	if err := unix.Statfs(o.path, &st); err != nil {
		return nil, &os.PathError{Op: "statfs", Path: o.path, Err: err}
	}
	if name, ok := remote[st.Type]; ok && !o.allowNetwork {
		return nil, errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("%s is on a network's file system (%s), where changes made elsewhere aren't seen; ask for it with allowNetworkMounts", o.path, name))
	}
	notify, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, short(err)
	}
	w := &watch{options: o, settings: s, notify: notify}
	if err := w.add(o.path, nil); err != nil {
		w.close()
		return nil, err
	}
	return w, nil
}

func (w *watch) close() { _ = w.notify.Close() }

// short explains that the kernel has no more of what watching takes.
func short(err error) error {
	switch {
	case errors.Is(err, syscall.ENOSPC):
		return errdefs.ErrResourceExhausted.WithMessage("the kernel has no more watches for directories (sysctl fs.inotify.max_user_watches)")
	case errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE):
		return errdefs.ErrResourceExhausted.WithMessage("the kernel has no more watchers (sysctl fs.inotify.max_user_instances)")
	}
	return err
}

// add watches a directory and, where that is asked for, those below it. What is in them already is handed to found, as it may
// have come before the watch.
func (w *watch) add(dir string, found func(path string)) error {
	if err := w.notify.Add(dir); err != nil {
		return short(err)
	}
	if !w.recursive {
		return nil
	}
	all, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, d := range all {
		path := filepath.Join(dir, d.Name())
		if found != nil {
			found(path)
		}
		if !d.IsDir() {
			continue
		}
		if err := w.add(path, found); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// errEnded is the end of a directory that was watched.
var errEnded = errdefs.ErrNotFound.WithMessage("the directory that was watched is gone")

// next waits for something to happen, and returns what it is to a client, which may be nothing. The error is
// errdefs.ErrDataLoss where events were lost; the watch goes on then.
func (w *watch) next(ctx context.Context) ([]*filesystem.FilesystemEvent, error) {
	select {
	case e, ok := <-w.notify.Events:
		if !ok {
			return nil, errEnded
		}
		return w.translate(e)
	case err := <-w.notify.Errors:
		if errors.Is(err, fsnotify.ErrEventOverflow) {
			err = lost
		}
		return nil, err
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

var lost = errdefs.ErrDataLoss.WithMessage("more changed than could be told of: events were lost; list the directory")

// types are what the kernel's events are to a client, in the order in which those that come at once happened.
var types = []struct {
	op fsnotify.Op
	is filesystem.EventType
}{
	{fsnotify.Create, filesystem.EventType_EVENT_TYPE_CREATE},
	{fsnotify.Write, filesystem.EventType_EVENT_TYPE_WRITE},
	{fsnotify.Chmod, filesystem.EventType_EVENT_TYPE_CHMOD},
	{fsnotify.Rename, filesystem.EventType_EVENT_TYPE_RENAME},
	{fsnotify.Remove, filesystem.EventType_EVENT_TYPE_REMOVE},
}

func (w *watch) translate(e fsnotify.Event) ([]*filesystem.FilesystemEvent, error) {
	e.Name = filepath.Clean(e.Name) // of what is in "/" it isn't
	if e.Name == w.path {
		if e.Has(fsnotify.Remove) || e.Has(fsnotify.Rename) {
			return nil, errEnded
		}
		return nil, nil
	}
	var events []*filesystem.FilesystemEvent
	for _, t := range types {
		if e.Has(t.op) {
			events = w.append(events, e.Name, t.is)
		}
	}
	if w.recursive && e.Has(fsnotify.Rename) {
		w.forget(e.Name)
	}
	if !w.recursive || !e.Has(fsnotify.Create) {
		return events, nil
	}
	if info, err := os.Lstat(e.Name); err != nil || !info.IsDir() {
		return events, nil
	}
	err := w.add(e.Name, func(path string) {
		if len(events) < maxQueued {
			events = w.append(events, path, filesystem.EventType_EVENT_TYPE_CREATE)
		}
	})
	if errors.Is(err, fs.ErrNotExist) { // removed meanwhile
		err = nil
	}
	return events, err
}

// forget ends the watches of a directory that has another name, and of those below it: they go by the old one. It is
// found again under the new name, if that is in the tree.
func (w *watch) forget(dir string) {
	for _, path := range w.notify.WatchList() {
		if path == dir || strings.HasPrefix(path, dir+"/") {
			_ = w.notify.Remove(path) // the kernel may have been faster
		}
	}
}

// append adds an event, unless its file isn't whole yet.
func (w *watch) append(events []*filesystem.FilesystemEvent, path string, t filesystem.EventType) []*filesystem.FilesystemEvent {
	name, err := filepath.Rel(w.path, path)
	if err != nil || owned.IsTemporary(path) {
		return events
	}
	event := &filesystem.FilesystemEvent{Name: text(name), Type: t}
	if w.entry && t != filesystem.EventType_EVENT_TYPE_REMOVE && t != filesystem.EventType_EVENT_TYPE_RENAME {
		if e, err := entry(path, w.settings.Users.Names()); err == nil {
			event.Entry = e
		}
	}
	return append(events, event)
}
