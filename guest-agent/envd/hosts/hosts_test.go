package hosts

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const own = "127.0.1.1\tbox\t# this sandbox\n"

func TestName(t *testing.T) {
	for name, c := range map[string]struct{ before, after string }{
		"empty":                   {"", localhost + own},
		"no newline at the end":   {"127.0.0.1 localhost", "127.0.0.1 localhost\n" + own},
		"another name before":     {localhost + "127.0.1.1\told\t# this sandbox\n10.0.0.1 db # mine\n", localhost + "10.0.0.1 db # mine\n" + own},
		"the name is another's":   {localhost + "10.0.0.1 x box\n", localhost + "10.0.0.1 x box\n"},
		"the name in a comment":   {localhost + "#10.0.0.1 box\n", localhost + "#10.0.0.1 box\n" + own},
		"the address of the name": {localhost + "box other\n", localhost + "box other\n" + own},
		"as it should be":         {localhost + own, localhost + own},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "hosts")
			if c.before != "" {
				if err := os.WriteFile(file, []byte(c.before), 0o640); err != nil {
					t.Fatal(err)
				}
			}
			for range 2 { // the second time nothing is left to do
				if err := Name(file, "box"); err != nil {
					t.Fatal(err)
				}
				if got, err := os.ReadFile(file); err != nil || string(got) != c.after {
					t.Errorf("%q, %v", got, err)
				}
			}
			if i, err := os.Stat(file); err != nil || (c.before != "") != (i.Mode().Perm() == 0o640) {
				t.Errorf("%v, %v", i.Mode(), err)
			}
			if left, _ := filepath.Glob(file + ".*"); left != nil {
				t.Error(left)
			}
		})
	}
}

func TestNameRefuses(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "hosts")
	for _, name := range []string{"", "a b", "a\nb", "a#"} {
		if err := Name(file, name); err == nil {
			t.Errorf("%q is a name", name)
		}
	}
	if err := os.WriteFile(file, []byte(strings.Repeat("# much\n", maxSize/7+1)), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, no := range []string{file, dir} {
		if err := Name(no, "box"); err == nil {
			t.Errorf("%s was written", no)
		}
	}
}
