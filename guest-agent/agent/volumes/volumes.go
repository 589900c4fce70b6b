// Package volumes prepares what a container mounts besides its root: small files that its creator sends along, files and
// directories of the host, the pod's shared memory. It knows nothing of specifications.
package volumes

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/guest-agent/agent/disks"
	"github.com/cubesandbox/cube/guest-agent/api"
	"github.com/cubesandbox/cube/internal/undo"
)

// ErrInvalid says that what is asked for makes no sense.
var ErrInvalid = errors.New("invalid volume")

// Limits of one container.
const (
	maxFiles    = 17 // 16 of the host's and the guest's resolv.conf
	maxFileSize = 64 << 10
	maxShares   = 64
)

// Share is a file or directory of the host: what a 9P server at the other end of the stream serves.
type Share struct {
	Stream   io.ReadWriteCloser
	File     string // the file's name in the server's tree, "" for all of the tree
	ReadOnly bool
}

// Volumes are a container's.
type Volumes struct {
	// Files and Shares are their paths, in the order of the request.
	Files, Shares []string

	files  string // where the files' file system is, "" without files
	mounts []*mount
}

// Prepare writes the files and mounts the shares below dir, which must exist. It takes the streams when it succeeds;
// otherwise nothing stays mounted.
func Prepare(ctx context.Context, dir string, files []*api.File, shares []Share) (_ *Volumes, err error) {
	if err := check(files, shares); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	v := &Volumes{}
	var u undo.Stack
	u.Push(v.Release)
	defer u.Run(&err)
	if len(files) > 0 {
		if err := v.write(filepath.Join(dir, "files"), files); err != nil {
			return nil, fmt.Errorf("write the container's files: %w", err)
		}
	}
	for i, s := range shares {
		m, err := mountShare(ctx, filepath.Join(dir, "share"+strconv.Itoa(i)), s)
		if err != nil {
			return nil, fmt.Errorf("mount share %d: %w", i, err)
		}
		v.mounts = append(v.mounts, m)
		path, err := m.path(s.File)
		if err != nil {
			return nil, fmt.Errorf("share %d: %w", i, err)
		}
		v.Shares = append(v.Shares, path)
	}
	return v, nil
}

func check(files []*api.File, shares []Share) error {
	if len(files) > maxFiles {
		return fmt.Errorf("%d files are more than %d", len(files), maxFiles)
	}
	for i, f := range files {
		switch {
		case len(f.GetContent()) > maxFileSize:
			return fmt.Errorf("file %d has %d bytes, more than %d", i, len(f.GetContent()), maxFileSize)
		case f.GetMode() > uint32(fs.ModePerm):
			return fmt.Errorf("file %d has the mode %#o", i, f.GetMode())
		}
	}
	if len(shares) > maxShares {
		return fmt.Errorf("%d shares are more than %d", len(shares), maxShares)
	}
	for i, s := range shares {
		if s.File == "." || s.File == ".." || strings.Contains(s.File, "/") {
			return fmt.Errorf("%q of share %d is no name of a file", s.File, i)
		}
	}
	return nil
}

// write makes a file system for the files, so that a container that may write to them fills nothing else, and writes
// them.
func (v *Volumes) write(dir string, files []*api.File) error {
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	data := fmt.Sprintf("mode=700,size=%d", maxFiles*maxFileSize)
	if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, data); err != nil {
		return fmt.Errorf("mount %s: %w", dir, err)
	}
	v.files = dir
	for i, f := range files {
		path := filepath.Join(dir, strconv.Itoa(i))
		if err := os.WriteFile(path, f.Content, 0o600); err != nil {
			return err
		}
		if err := os.Chmod(path, fs.FileMode(f.Mode)); err != nil {
			return err
		}
		v.Files = append(v.Files, path)
	}
	return nil
}

// Release unmounts everything, once the container's processes have ended. Afterwards nothing reaches the host any more,
// also when it fails. It may be called again.
func (v *Volumes) Release() error {
	stop := v.Watch()
	defer stop()
	var errs []error
	for _, m := range v.mounts {
		errs = append(errs, m.unmount())
	}
	if v.files != "" {
		errs = append(errs, disks.Unmount(v.files))
	}
	return errors.Join(errs...)
}

// Watch gives up the shares whose servers say nothing for too long, until stop is called: what waits for them then gets
// errors. It is for when a container ends, as a process that waits for a server can't even be killed.
func (v *Volumes) Watch() (stop func()) {
	done := make(chan struct{})
	from := time.Now()
	for _, m := range v.mounts {
		go m.watch(from, done)
	}
	return sync.OnceFunc(func() { close(done) })
}
