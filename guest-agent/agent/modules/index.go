// Package modules loads kernel modules: those that booting takes from a list, all others when the kernel asks for them,
// from a read-only disk. For the kernel, the agent's binary is modprobe.
package modules

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
)

// ErrUnknown says that no module has that name or alias.
var ErrUnknown = errors.New("no such module")

// index is what depmod found out about a kernel's modules. Names have "_" for "-", as in the kernel.
type index struct {
	files   map[string]string   // name to file
	needs   map[string][]string // name to the files to load before, in that order
	aliases [][2]string         // pattern, name
	pre     map[string][]string // name to what to load before if it exists (softdep)
	post    map[string][]string // name to what to load after if it exists
	builtin map[string]bool
}

// readIndex reads depmod's files (modules.dep(5), modprobe.d(5)) in the root of a /lib/modules/<release> tree.
func readIndex(tree fs.FS) (*index, error) {
	x := &index{
		files: map[string]string{}, needs: map[string][]string{},
		pre: map[string][]string{}, post: map[string][]string{}, builtin: map[string]bool{},
	}
	for file, parse := range map[string]func(line string){
		"modules.dep": x.parseDep, "modules.alias": x.parseAlias, "modules.softdep": x.parseSoftdep,
		"modules.builtin": func(line string) { x.builtin[moduleName(line)] = true },
	} {
		if err := eachLine(tree, file, parse); err != nil {
			return nil, err
		}
	}
	return x, nil
}

func eachLine(tree fs.FS, file string, parse func(string)) error {
	f, err := tree.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	s := bufio.NewScanner(f)
	for s.Scan() {
		if line := s.Text(); line != "" && line[0] != '#' {
			parse(line)
		}
	}
	return s.Err()
}

// parseDep reads "file: file…"; what stands last has to be loaded first.
func (x *index) parseDep(line string) {
	file, needs, _ := strings.Cut(line, ":")
	name := moduleName(file)
	x.files[name] = file
	x.needs[name] = strings.Fields(needs)
	slices.Reverse(x.needs[name])
}

// parseAlias reads "alias pattern name".
func (x *index) parseAlias(line string) {
	if f := strings.Fields(line); len(f) == 3 && f[0] == "alias" {
		x.aliases = append(x.aliases, [2]string{underscores(f[1]), underscores(f[2])})
	}
}

// parseSoftdep reads "softdep name pre: names… post: names…". Names before either word count for nothing.
func (x *index) parseSoftdep(line string) {
	f := strings.Fields(line)
	if len(f) < 2 || f[0] != "softdep" {
		return
	}
	name := underscores(f[1])
	var into map[string][]string
	for _, word := range f[2:] {
		switch {
		case word == "pre:":
			into = x.pre
		case word == "post:":
			into = x.post
		case into != nil:
			into[name] = append(into[name], word)
		}
	}
}

// resolve returns the modules that a name or an alias stands for, none when the kernel has it built in.
func (x *index) resolve(request string) ([]string, error) {
	request = underscores(request)
	switch {
	case x.builtin[request]:
		return nil, nil
	case x.files[request] != "":
		return []string{request}, nil
	}
	var names []string
	for _, a := range x.aliases {
		if ok, _ := path.Match(a[0], request); ok && !slices.Contains(names, a[1]) {
			names = append(names, a[1])
		}
	}
	if names == nil {
		return nil, fmt.Errorf("%w: %s", ErrUnknown, request)
	}
	return names, nil
}

// order appends the files to load for a module, each after what it needs. Modules in seen are left out.
func (x *index) order(files []string, name string, seen map[string]bool) []string {
	if seen[name] || x.files[name] == "" {
		return files
	}
	seen[name] = true
	soft := func(requests []string) {
		for _, r := range requests {
			names, _ := x.resolve(r) // it's only a wish
			for _, n := range names {
				files = x.order(files, n, seen)
			}
		}
	}
	soft(x.pre[name])
	for _, file := range x.needs[name] {
		if n := moduleName(file); !seen[n] {
			seen[n] = true
			files = append(files, file)
		}
	}
	files = append(files, x.files[name])
	soft(x.post[name])
	return files
}

// moduleName is what the kernel calls the module in a file.
func moduleName(file string) string {
	name, _, _ := strings.Cut(path.Base(file), ".ko")
	return underscores(name)
}

func underscores(s string) string { return strings.ReplaceAll(s, "-", "_") }
