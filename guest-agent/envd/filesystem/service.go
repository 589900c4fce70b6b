// Package filesystem serves a sandbox's tree to SDKs: what there is, and what changes. It acts as root, and what it makes
// belongs to the user of the request.
package filesystem

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"connectrpc.com/connect"
	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/guest-agent/envd/api/filesystem"
	"github.com/cubesandbox/cube/guest-agent/envd/owned"
	"github.com/cubesandbox/cube/guest-agent/envd/settings"
	"github.com/cubesandbox/cube/guest-agent/envd/status"
	"github.com/cubesandbox/cube/guest-agent/envd/users"
)

// maxEntries bounds a listing, of which all is in memory.
const maxEntries = 200_000

// Service is filesystem.Filesystem.
type Service struct {
	Settings *settings.Store

	watchers watchers
}

var _ filesystem.FilesystemHandler = (*Service)(nil)

// resolve is what a request's path means to who sends it.
func (s *Service) resolve(h http.Header, path string) (string, users.User, error) {
	u, err := s.Settings.Caller(h)
	if err != nil {
		return "", u, err
	}
	path, err = u.Resolve(path, s.Settings.Get().Workdir)
	return path, u, err
}

// named is resolve for what doesn't happen to the default directory because a path was forgotten.
func (s *Service) named(h http.Header, path, what string) (string, users.User, error) {
	if path == "" {
		return "", users.User{}, errdefs.ErrInvalidArgument.WithMessage(what + " is empty")
	}
	return s.resolve(h, path)
}

func (s *Service) Stat(_ context.Context, r *connect.Request[filesystem.StatRequest]) (*connect.Response[filesystem.StatResponse], error) {
	path, _, err := s.resolve(r.Header(), r.Msg.GetPath())
	if err != nil {
		return nil, status.Connect(err)
	}
	e, err := entry(path, s.Settings.Users.Names())
	if errors.Is(err, syscall.ENOTDIR) { // a file has nothing below it
		err = errdefs.ErrNotFound.WithMessage(err.Error())
	}
	return connect.NewResponse(&filesystem.StatResponse{Entry: e}), status.Connect(err)
}

func (s *Service) MakeDir(_ context.Context, r *connect.Request[filesystem.MakeDirRequest]) (*connect.Response[filesystem.MakeDirResponse], error) {
	path, u, err := s.resolve(r.Header(), r.Msg.GetPath())
	if err != nil {
		return nil, status.Connect(err)
	}
	if info, err := os.Stat(path); err == nil && info.IsDir() {
		return nil, status.Connect(errdefs.ErrAlreadyExists.WithMessage(path + " is there already"))
	}
	if err := owned.MakeDirs(path, u); err != nil {
		return nil, status.Connect(owned.Full(err))
	}
	e, err := entry(path, s.Settings.Users.Names())
	return connect.NewResponse(&filesystem.MakeDirResponse{Entry: e}), status.Connect(err)
}

func (s *Service) Move(_ context.Context, r *connect.Request[filesystem.MoveRequest]) (*connect.Response[filesystem.MoveResponse], error) {
	source, u, err := s.named(r.Header(), r.Msg.GetSource(), "source")
	if err != nil {
		return nil, status.Connect(err)
	}
	destination, _, err := s.named(r.Header(), r.Msg.GetDestination(), "destination")
	if err != nil {
		return nil, status.Connect(err)
	}
	if err := move(source, destination, u); err != nil {
		return nil, status.Connect(owned.Full(err))
	}
	e, err := entry(destination, s.Settings.Users.Names())
	return connect.NewResponse(&filesystem.MoveResponse{Entry: e}), status.Connect(err)
}

func move(source, destination string, u users.User) error {
	if _, err := os.Lstat(source); err != nil {
		return err
	}
	if err := owned.MakeDirs(filepath.Dir(destination), u); err != nil {
		return err
	}
	err := os.Rename(source, destination)
	if errors.Is(err, syscall.EXDEV) {
		return errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("%s and %s are on different file systems; copy with the command mv", source, destination))
	}
	return err
}

func (s *Service) Remove(_ context.Context, r *connect.Request[filesystem.RemoveRequest]) (*connect.Response[filesystem.RemoveResponse], error) {
	path, _, err := s.named(r.Header(), r.Msg.GetPath(), "path")
	if err == nil && path == "/" {
		err = errdefs.ErrInvalidArgument.WithMessage("/ can't be removed")
	}
	if err == nil {
		err = os.RemoveAll(path)
	}
	return connect.NewResponse(&filesystem.RemoveResponse{}), status.Connect(err)
}

func (s *Service) ListDir(ctx context.Context, r *connect.Request[filesystem.ListDirRequest]) (*connect.Response[filesystem.ListDirResponse], error) {
	path, _, err := s.resolve(r.Header(), r.Msg.GetPath())
	if err != nil {
		return nil, status.Connect(err)
	}
	entries, err := list(ctx, path, int(min(max(r.Msg.GetDepth(), 1), 1<<16)), s.Settings.Users.Names())
	return connect.NewResponse(&filesystem.ListDirResponse{Entries: entries}), status.Connect(err)
}

// list lists what is below root, to a depth of at least 1. A link is followed only where it is root.
func list(ctx context.Context, root string, depth int, names users.Names) ([]*filesystem.EntryInfo, error) {
	if err := checkDir(root); err != nil {
		return nil, err
	}
	real, err := filepath.EvalSymlinks(root)
	if err != nil {
		return nil, err
	}
	var entries []*filesystem.EntryInfo
	err = filepath.WalkDir(real, func(path string, d fs.DirEntry, err error) error {
		if path == real {
			return err
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		below := path[len(strings.TrimSuffix(real, "/"))+1:]
		e, statErr := entry(path, names)
		if errors.Is(statErr, fs.ErrNotExist) { // removed meanwhile
			return nil
		}
		if statErr != nil {
			return statErr
		}
		if err != nil { // a directory, whose entry is there from the call before
			return nil
		}
		if len(entries) == maxEntries {
			return errdefs.ErrResourceExhausted.WithMessage(fmt.Sprintf("%s has more than %d entries; list less deep, or with a command", root, maxEntries))
		}
		e.Path = text(filepath.Join(root, below))
		entries = append(entries, e)
		if d.IsDir() && strings.Count(below, "/")+1 >= depth {
			return fs.SkipDir
		}
		return nil
	})
	return entries, err
}

// checkDir says whether a directory is at the path, with links followed.
func checkDir(path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	if !info.IsDir() {
		return errdefs.ErrInvalidArgument.WithMessage(path + " is not a directory")
	}
	return nil
}
