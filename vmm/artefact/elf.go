package artefact

import (
	"debug/elf"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	continuity "github.com/containerd/continuity/fs"
)

// libDirs is where Debian's ld.so looks for libraries that no run path names.
var libDirs = []string{"/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib", "/usr/lib"}

// Sysroot is a directory of unpacked Debian packages.
type Sysroot string

// Add puts files of the sysroot into a tree, under the same paths and with what symbolic links lead to, together with
// all shared libraries and the dynamic loader that they need.
func (s Sysroot) Add(t Tree, paths ...string) error {
	for len(paths) > 0 {
		at := clean(paths[0])
		paths = paths[1:]
		if _, ok := t[at]; ok {
			continue
		}
		file, info, err := s.find(at)
		if err != nil {
			return err
		}
		perm := fs.FileMode(0o644)
		if info.Mode()&0o111 != 0 {
			perm = 0o755
		}
		t.Add(at, Node{Mode: perm, Source: file})
		needed, err := s.needed(at, file)
		if err != nil {
			return fmt.Errorf("libraries of %s: %w", at, err)
		}
		paths = append(paths, needed...)
	}
	return nil
}

// find follows symbolic links without leaving the sysroot.
func (s Sysroot) find(at string) (string, fs.FileInfo, error) {
	file, err := continuity.RootPath(string(s), at)
	if err != nil {
		return "", nil, err
	}
	info, err := os.Stat(file)
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a regular file", file)
	}
	return file, info, err
}

// needed lists the paths of the loader and the libraries that an ELF file asks for. Other files need nothing.
func (s Sysroot) needed(at, file string) ([]string, error) {
	r, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	magic := make([]byte, len(elf.ELFMAG))
	if n, err := r.ReadAt(magic, 0); err != nil && err != io.EOF {
		return nil, err
	} else if string(magic[:n]) != elf.ELFMAG {
		return nil, nil
	}
	f, err := elf.NewFile(r)
	if err != nil {
		return nil, err
	}
	var needed []string
	for _, p := range f.Progs {
		if p.Type != elf.PT_INTERP {
			continue
		}
		loader := make([]byte, p.Filesz)
		if _, err := p.ReadAt(loader, 0); err != nil {
			return nil, fmt.Errorf("read the loader's name: %w", err)
		}
		needed = append(needed, strings.TrimRight(string(loader), "\x00"))
	}
	if f.Section(".dynamic") == nil {
		return needed, nil
	}
	var dirs []string
	for _, tag := range []elf.DynTag{elf.DT_RPATH, elf.DT_RUNPATH} {
		values, err := f.DynString(tag)
		if err != nil {
			return nil, err
		}
		for _, v := range values {
			v = strings.ReplaceAll(v, "$ORIGIN", "/"+path.Dir(at))
			dirs = append(dirs, strings.Split(v, ":")...)
		}
	}
	dirs = append(dirs, libDirs...)
	libs, err := f.ImportedLibraries()
	if err != nil {
		return nil, err
	}
	for _, lib := range libs {
		found := false
		for _, dir := range dirs {
			if _, _, err := s.find(filepath.Join(dir, lib)); err == nil {
				needed = append(needed, filepath.Join(dir, lib))
				found = true
				break
			}
		}
		if !found {
			return nil, fmt.Errorf("%s is in none of %s", lib, strings.Join(dirs, ", "))
		}
	}
	return needed, nil
}
