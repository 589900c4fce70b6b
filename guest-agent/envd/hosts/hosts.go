// Package hosts has a sandbox's own names mean the sandbox. Images often have no /etc/hosts, as what runs them brings one, and the
// sandbox's name is another in each that is made from a template: without a line for it, what looks it up, such as sudo, asks a name
// server, which takes long and finds nothing.
package hosts

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
)

// File is where resolvers look first.
const File = "/etc/hosts"

// maxSize is of what is taken for a file of hosts.
const maxSize = 1 << 20

const (
	localhost = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
	// mark ends the line that is this package's own, which the next name's replaces.
	mark = "# this sandbox"
)

// Name has the file say that localhost and the name are the machine itself. Lines of others stay, and hold: a name that one of them has
// is left to it. The file is there as a whole or as it was.
func Name(file, name string) error {
	if len(strings.Fields(name)) != 1 || strings.ContainsAny(name, "# \t\n") {
		return fmt.Errorf("%q can't be a host's name", name)
	}
	before, mode, err := read(file)
	if err != nil {
		return err
	}
	after := with(before, name)
	if bytes.Equal(before, after) {
		return nil
	}
	tmp := file + ".next"
	if err := os.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	err = os.WriteFile(tmp, after, mode)
	if err == nil {
		err = os.Rename(tmp, file)
	}
	if err != nil {
		_ = os.Remove(tmp) // the first error says more
	}
	return err
}

// read returns a file's content and mode, those of an empty one if it isn't there.
func read(file string) ([]byte, fs.FileMode, error) {
	f, err := os.Open(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, 0o644, nil
	}
	if err != nil {
		return nil, 0, err
	}
	defer f.Close()
	i, err := f.Stat()
	if err != nil {
		return nil, 0, err
	}
	if !i.Mode().IsRegular() || i.Size() > maxSize {
		return nil, 0, fmt.Errorf("%s is no file of hosts", file)
	}
	b, err := io.ReadAll(io.LimitReader(f, maxSize))
	return b, i.Mode().Perm(), err
}

// with is a file's text with what it lacks.
func with(text []byte, name string) []byte {
	var kept strings.Builder
	has := map[string]bool{}
	for line := range strings.Lines(string(text)) {
		if strings.HasSuffix(strings.TrimRight(line, "\n"), mark) {
			continue
		}
		kept.WriteString(line)
		entry, _, _ := strings.Cut(line, "#")
		if f := strings.Fields(entry); len(f) > 0 {
			for _, n := range f[1:] {
				has[n] = true
			}
		}
	}
	lines := kept.String()
	if lines != "" && !strings.HasSuffix(lines, "\n") {
		lines += "\n"
	}
	if !has["localhost"] {
		lines = localhost + lines
	}
	if !has[name] && name != "localhost" {
		lines += "127.0.1.1\t" + name + "\t" + mark + "\n"
	}
	return []byte(lines)
}
