package filesystem

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cubesandbox/cube/guest-agent/envd/api/filesystem"
	"github.com/cubesandbox/cube/guest-agent/envd/metadata"
	"github.com/cubesandbox/cube/guest-agent/envd/users"
)

// entry describes what is at the path itself. Bytes that aren't UTF-8 are replaced: the protocol has none.
func entry(path string, names users.Names) (*filesystem.EntryInfo, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return nil, err
	}
	e := &filesystem.EntryInfo{
		Name: text(filepath.Base(path)), Type: typeOf(info.Mode()), Path: text(path), Size: info.Size(), Mode: uint32(info.Mode().Perm()),
		Permissions: info.Mode().String(), ModifiedTime: timestamppb.New(info.ModTime()), Metadata: metadata.Get(path),
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		e.Owner, e.Group = names.User(st.Uid), names.Group(st.Gid)
	}
	if info.Mode()&fs.ModeSymlink != 0 {
		e.Type = filesystem.FileType_FILE_TYPE_UNSPECIFIED
		target, err := filepath.EvalSymlinks(path)
		if err == nil {
			if info, err := os.Lstat(target); err == nil {
				e.Type = typeOf(info.Mode())
			}
		} else if target, err = os.Readlink(path); err != nil {
			return nil, err
		}
		target = text(target)
		e.SymlinkTarget = &target
	}
	return e, nil
}

func typeOf(m fs.FileMode) filesystem.FileType {
	switch {
	case m.IsRegular():
		return filesystem.FileType_FILE_TYPE_FILE
	case m.IsDir():
		return filesystem.FileType_FILE_TYPE_DIRECTORY
	case m&fs.ModeSymlink != 0:
		return filesystem.FileType_FILE_TYPE_SYMLINK
	}
	return filesystem.FileType_FILE_TYPE_UNSPECIFIED
}

func text(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }
