package guests

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/guest-agent/envd"
)

// TestCommands: the real envd runs what it is told, with input, tells of the output line by line, and of an end that isn't one.
func TestCommands(t *testing.T) {
	addr := netip.MustParseAddr("127.91.3.8")
	g := New(func(d time.Duration) time.Duration { return d })
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	life, end := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() {
		ended <- envd.Run(life, envd.Config{Address: netip.AddrPortFrom(addr, Port).String(), User: "root"})
	}()
	defer func() {
		end()
		must(t, <-ended)
	}()
	must(t, g.Listens(ctx, addr, Port))

	var lines []string
	each := func(l string, isError bool) {
		if isError {
			l = "! " + l
		}
		lines = append(lines, l)
	}
	shell := func(text string) Command { return Command{Program: "/bin/sh", Args: []string{"-c", text}} }
	for name, c := range map[string]struct {
		Command
		want []string
	}{
		"lines":    {shell(`echo one; printf 'two\nthree'`), []string{"one", "two", "three"}},
		"terminal": {shell(`printf '10%%\r\033[1;31m100%%\033[0m\a\r\n\tdone\377\n'`), []string{"100%", "\tdone�"}},
		"errors":   {shell("echo bad >&2"), []string{"! bad"}},
		"none":     {shell("true"), nil},
		"place":    {Command{Program: "/bin/sh", Args: []string{"-c", "echo $PWD $A $USER"}, User: "root", Dir: "/tmp", Env: map[string]string{"A": "b"}}, []string{"/tmp b root"}},
		"input":    {Command{Program: "/bin/sh", Args: []string{"-c", "wc -c"}, Input: strings.NewReader(strings.Repeat("x", 3*inputPiece+1))}, []string{fmt.Sprint(3*inputPiece + 1)}},
		"unread":   {Command{Program: "/bin/sh", Args: []string{"-c", "exec <&-; echo enough"}, Input: io.LimitReader(endless{}, 64<<20)}, []string{"enough"}},
		"no input": {Command{Program: "/bin/sh", Args: []string{"-c", "cat; echo end"}, Input: strings.NewReader("")}, []string{"end"}},
	} {
		lines = nil
		if err := g.Do(ctx, addr, c.Command, each); err != nil || !slices.Equal(lines, c.want) {
			t.Errorf("%s: %q, %v", name, lines, err)
		}
	}
	lines = nil
	must(t, g.Do(ctx, addr, shell("head -c 100000 /dev/zero | tr '\\0' x; echo; echo after"), each))
	if len(lines) != 2 || len(lines[0]) != maxLine || lines[1] != "after" {
		t.Errorf("%d lines, the first of %d bytes", len(lines), len(lines[0]))
	}
	var failed *Ended
	if err := g.Do(ctx, addr, shell("exit 3"), each); !errors.As(err, &failed) || failed.Status != "exit status 3" {
		t.Errorf("one that fails: %v", err)
	}
	broken := Command{Program: "/bin/cat", Input: io.MultiReader(strings.NewReader("x"), iotest.ErrReader(errors.New("the disk is broken")))}
	if err := g.Do(ctx, addr, broken, each); err == nil || !strings.Contains(err.Error(), "the disk is broken") {
		t.Errorf("an input that can't be read: %v", err)
	}
	if err := g.Do(ctx, addr, Command{Program: "/bin/true", User: "nosuch"}, each); err == nil || !strings.Contains(err.Error(), "no user") {
		t.Errorf("as nobody: %v", err)
	}
	short, stop := context.WithTimeout(ctx, 100*time.Millisecond)
	defer stop()
	if err := g.Do(short, addr, shell("sleep 60"), each); err == nil {
		t.Error("one that takes too long has ended well")
	}

	dir := filepath.Join(t.TempDir(), "a/b")
	for range 2 {
		must(t, g.MakeDir(ctx, addr, "root", dir))
	}
	if info, err := os.Stat(dir); err != nil || !info.IsDir() {
		t.Errorf("the directory: %v", err)
	}
	must(t, g.Stat(ctx, addr, "root", dir))
	if err := g.Stat(ctx, addr, "root", dir+"/c"); !errdefs.IsNotFound(err) {
		t.Errorf("what isn't there: %v", err)
	}
	if err := g.Stat(ctx, addr, "nosuch", dir); !errdefs.IsUnauthorized(err) {
		t.Errorf("as nobody: %v", err)
	}
}

// endless is an input without end.
type endless struct{}

func (endless) Read(b []byte) (int, error) { return len(b), nil }
