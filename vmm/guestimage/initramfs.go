package guestimage

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"github.com/cavaliergopher/cpio"

	"github.com/cubesandbox/cube/vmm/artefact"
)

// BootModulesFile is the file in the initramfs that lists the modules to load at boot: one path per line, in the order
// of loading.
const BootModulesFile = "/etc/cube/boot-modules"

// CrunPath is where crun is in the initramfs.
const CrunPath = "/usr/bin/crun"

// initramfs lays out the guest's root: the agent as /init (and as the kernel's modprobe), crun with its libraries, the
// modules needed at boot.
func initramfs(in Input, s *moduleSet) (artefact.Tree, error) {
	t := artefact.Tree{}
	for _, dir := range []string{"dev", "etc", "proc", "root", "run", "sys", "var"} {
		t.Dir(dir, 0o755)
	}
	t.Dir("tmp", 0o777|fs.ModeSticky)
	t.Add("init", artefact.Node{Mode: 0o755, Source: in.Agent})
	t.Add("sbin/modprobe", artefact.Node{Mode: fs.ModeSymlink | 0o777, Link: "/init"})
	if err := in.Crun.Add(t, CrunPath); err != nil {
		return nil, fmt.Errorf("crun: %w", err)
	}
	boot, err := s.order(bootModules...)
	if err != nil {
		return nil, err
	}
	var list strings.Builder
	for _, name := range boot {
		at := path.Join("/lib/modules", in.Release, s.files[name])
		t.Add(at, artefact.Node{Mode: 0o644, Source: filepath.Join(s.dir, s.files[name])})
		fmt.Fprintln(&list, at)
	}
	t.Add(BootModulesFile, artefact.Node{Mode: 0o644, Data: []byte(list.String())})
	return t, nil
}

// writeInitramfs writes a tree as an uncompressed newc archive: an emulated guest takes longer to decompress it than the
// host to read it. /dev/console, which PID 1 gets as its output, is in the kernel's own initramfs.
func writeInitramfs(file string, t artefact.Tree) error {
	f, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	defer f.Close()
	buffered := bufio.NewWriterSize(f, 1<<20)
	w := cpio.NewWriter(buffered)
	for _, at := range t.Paths() {
		if err := writeCPIONode(w, at, t[at]); err != nil {
			return fmt.Errorf("pack %s: %w", at, err)
		}
	}
	return errors.Join(w.Close(), buffered.Flush(), f.Close())
}

func writeCPIONode(w *cpio.Writer, at string, n artefact.Node) error {
	h := &cpio.Header{Name: at, Links: 1, ModTime: time.Unix(0, 0), Mode: cpio.FileMode(n.Mode.Perm())}
	if n.Mode&fs.ModeSticky != 0 {
		h.Mode |= cpio.ModeSticky
	}
	switch n.Mode.Type() {
	case fs.ModeDir:
		h.Mode |= cpio.TypeDir
		return w.WriteHeader(h)
	case fs.ModeSymlink:
		h.Mode |= cpio.TypeSymlink
		h.Linkname, h.Size = n.Link, int64(len(n.Link))
		if err := w.WriteHeader(h); err != nil {
			return err
		}
		_, err := io.WriteString(w, n.Link)
		return err
	}
	r, size, err := n.Open()
	if err != nil {
		return err
	}
	defer r.Close()
	h.Mode |= cpio.TypeReg
	h.Size = size
	if err := w.WriteHeader(h); err != nil {
		return err
	}
	_, err = io.Copy(w, r)
	return err
}
