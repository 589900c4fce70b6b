package share

import (
	"fmt"
	"strconv"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/shim/spec"
	"github.com/cubesandbox/cube/vmm/jail"
)

const (
	// program is the helper's name, in BinDir and in the jail.
	program = "cube-share"
	// FileName is what the one file in the root directory of a share of a file is called.
	FileName = "file"
)

// openTrees opens the shares, number i for /i or /i/file, and the helper itself. That is mounted read-only too: its
// capabilities must not let it write to what the next helper runs.
func openTrees(cfg Config) (_ []jail.Tree, err error) {
	var trees []jail.Tree
	defer func() {
		if err != nil {
			closeTrees(trees)
		}
	}()
	for i, s := range cfg.Shares {
		t, err := openShare(strconv.Itoa(i), s)
		if err != nil {
			return nil, err
		}
		trees = append(trees, t)
	}
	f, err := jail.OpenTree(cfg.Host.Bin(program), true, false)
	if err != nil {
		return nil, fmt.Errorf("cube-share is missing: %w; run the set-up (make build)", err)
	}
	return append(trees, jail.Tree{File: f, Path: program}), nil
}

func openShare(name string, s spec.Share) (jail.Tree, error) {
	f, err := jail.OpenTree(s.Source, s.ReadOnly, s.Recursive)
	if err != nil {
		return jail.Tree{}, fmt.Errorf("bind mount of %s: %w", s.Source, err)
	}
	t := jail.Tree{File: f, Path: name}
	var st unix.Stat_t
	if err = unix.Fstat(int(f.Fd()), &st); err == nil {
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFDIR:
			return t, nil
		case unix.S_IFREG:
			t.Path += "/" + FileName
			return t, nil
		}
		err = errdefs.ErrInvalidArgument.WithMessage("only files and directories can be shared with a machine")
	}
	_ = f.Close()
	return jail.Tree{}, fmt.Errorf("bind mount of %s: %w", s.Source, err)
}

func closeTrees(trees []jail.Tree) {
	for _, t := range trees {
		_ = t.File.Close()
	}
}
