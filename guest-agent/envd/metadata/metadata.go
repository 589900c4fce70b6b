// Package metadata keeps what a file was uploaded with in extended attributes of the file, so that it goes where the file
// goes.
package metadata

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

const (
	// prefix is that of the attributes.
	prefix = "user.e2b."
	// headerPrefix is that of an upload's headers.
	headerPrefix = "X-Metadata-"
)

// Limits, in bytes: of a key the kernel's (255 with the prefix), of all keys and values what fits in a block.
const (
	maxKey   = 246
	maxTotal = 4096
)

// maxList bounds what is read of a file's attributes, which the sandbox sets as it likes; it is the kernel's own limit.
const maxList = 64 << 10

// FromHeader is an upload's metadata. Keys are in lower case, as header names have none of their own. The error is
// errdefs.ErrInvalidArgument.
func FromHeader(h http.Header) (map[string]string, error) {
	var m map[string]string
	total := 0
	for name, values := range h {
		key, ok := strings.CutPrefix(name, headerPrefix)
		if !ok {
			continue
		}
		key = strings.ToLower(key)
		value := strings.Join(values, ", ")
		if key == "" || len(key) > maxKey {
			return nil, errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("header %s: a key has 1 to %d bytes", name, maxKey))
		}
		if total += len(key) + len(value); total > maxTotal {
			return nil, errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("headers %s*: more than %d bytes of metadata", headerPrefix, maxTotal))
		}
		if m == nil {
			m = map[string]string{}
		}
		m[key] = value
	}
	return m, nil
}

// Set gives an open file the metadata in place of what it has. The error is errdefs.ErrFailedPrecondition where the file
// system keeps none, but there is some.
func Set(f *os.File, m map[string]string) error {
	fd := int(f.Fd())
	before, err := list(func(b []byte) (int, error) { return unix.Flistxattr(fd, b) })
	if err != nil && len(m) == 0 {
		return nil
	}
	for _, name := range before {
		if _, kept := m[strings.TrimPrefix(name, prefix)]; !kept {
			err = errors.Join(err, unix.Fremovexattr(fd, name))
		}
	}
	for key, value := range m {
		err = errors.Join(err, unix.Fsetxattr(fd, prefix+key, []byte(value), 0))
	}
	if errors.Is(err, unix.ENOTSUP) {
		return errdefs.ErrFailedPrecondition.WithMessage("the file system of " + f.Name() + " keeps no metadata (extended attributes)")
	}
	if err != nil {
		return &os.PathError{Op: "set metadata of", Path: f.Name(), Err: err}
	}
	return nil
}

// Get returns a file's metadata, nil where it has none. Links aren't followed.
func Get(path string) map[string]string {
	names, err := list(func(b []byte) (int, error) { return unix.Llistxattr(path, b) })
	if err != nil || len(names) == 0 {
		return nil
	}
	m := map[string]string{}
	buf := make([]byte, maxList)
	for _, name := range names {
		if n, err := unix.Lgetxattr(path, name, buf); err == nil {
			m[strings.TrimPrefix(name, prefix)] = strings.ToValidUTF8(string(buf[:n]), "\uFFFD")
		}
	}
	return m
}

// list returns the names of the attributes that are metadata.
func list(read func([]byte) (int, error)) ([]string, error) {
	n, err := read(nil)
	if n == 0 || err != nil {
		return nil, err
	}
	buf := make([]byte, maxList)
	if n, err = read(buf); err != nil {
		return nil, err
	}
	var names []string
	for name := range strings.SplitSeq(string(buf[:n]), "\x00") {
		if len(name) > len(prefix) && strings.HasPrefix(name, prefix) {
			names = append(names, strings.ToValidUTF8(name, "\uFFFD"))
		}
	}
	return names, nil
}
