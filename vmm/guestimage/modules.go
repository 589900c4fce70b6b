package guestimage

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// moduleSet is what depmod says about a kernel's modules. Modules are named as the kernel does: by the file's name
// without ".ko" and with "_" for "-".
type moduleSet struct {
	dir     string              // the kernel's /lib/modules directory
	files   map[string]string   // a module's file, relative to dir
	deps    map[string][]string // the modules that it needs, in the order in which they must be loaded
	builtin map[string]bool
}

// readModules reads modules.dep and modules.builtin in dir.
func readModules(dir string) (*moduleSet, error) {
	s := &moduleSet{dir: dir, files: map[string]string{}, deps: map[string][]string{}, builtin: map[string]bool{}}
	err := eachLine(filepath.Join(dir, "modules.dep"), func(line string) error {
		file, deps, ok := strings.Cut(line, ":")
		if !ok {
			return fmt.Errorf("%q has no colon", line)
		}
		name := moduleName(file)
		s.files[name] = file
		// depmod lists what must be loaded last first.
		for _, dep := range slices.Backward(strings.Fields(deps)) {
			s.deps[name] = append(s.deps[name], moduleName(dep))
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	err = eachLine(filepath.Join(dir, "modules.builtin"), func(line string) error {
		s.builtin[moduleName(line)] = true
		return nil
	})
	return s, err
}

// order lists the named modules and all that they need, each after what it needs and otherwise as named. What is built
// in is left out; a module that the kernel hasn't got is an error.
func (s *moduleSet) order(names ...string) ([]string, error) {
	var out []string
	seen := map[string]bool{}
	add := func(name string) error {
		if seen[name] {
			return nil
		}
		if s.files[name] == "" {
			return fmt.Errorf("the kernel in %s has no module %s", s.dir, name)
		}
		seen[name] = true
		out = append(out, name)
		return nil
	}
	for _, name := range names {
		name = moduleName(name)
		if s.builtin[name] {
			continue
		}
		for _, n := range append(slices.Clone(s.deps[name]), name) {
			if err := add(n); err != nil {
				return nil, err
			}
		}
	}
	return out, nil
}

// matching lists the modules whose paths begin with one of some prefixes and with none of others.
func (s *moduleSet) matching(prefixes, without []string) []string {
	match := func(file string, prefixes []string) bool {
		return slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(file, p) })
	}
	var out []string
	for name, file := range s.files {
		if match(file, prefixes) && !match(file, without) {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out
}

// filter returns the lines of one of depmod's files that are about the chosen modules; module picks a line's module.
func (s *moduleSet) filter(file string, chosen []string, module func(line string) string) ([]byte, error) {
	in := map[string]bool{}
	for _, name := range chosen {
		in[name] = true
	}
	var b []byte
	err := eachLine(filepath.Join(s.dir, file), func(line string) error {
		if in[moduleName(module(line))] {
			b = append(append(b, line...), '\n')
		}
		return nil
	})
	return b, err
}

// moduleName is the kernel's name for the module in a file.
func moduleName(file string) string {
	name, _, _ := strings.Cut(path.Base(file), ".ko")
	return strings.ReplaceAll(name, "-", "_")
}

// eachLine calls f with each line of a text file that is neither empty nor a comment.
func eachLine(file string, f func(line string) error) error {
	r, err := os.Open(file)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w (depmod makes it)", err)
	} else if err != nil {
		return err
	}
	defer r.Close()
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		line := strings.TrimSpace(lines.Text())
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		if err := f(line); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	return nil
}
