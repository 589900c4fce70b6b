package templates

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
)

// TestExpand: variables are put in as Docker does it.
func TestExpand(t *testing.T) {
	env := map[string]string{"A": "1", "B_2": "two words", "EMPTY": ""}
	look := func(name string) (string, bool) { v, ok := env[name]; return v, ok }
	for text, want := range map[string]string{
		"": "", "plain": "plain", "$A": "1", "x${A}y": "x1y", "$B_2!": "two words!", "$AB": "", "${NONE:-b}": "b", "${A:-b}": "1", "${EMPTY:-b}": "b",
		"${A:+b}": "b", "${NONE:+b}": "", `\$A`: "$A", `a\\b`: `a\b`, "$": "$", "$5": "$5", "50%$": "50%$", `end\`: `end\`, "$A:$A": "1:1",
	} {
		if got, err := expand(text, look); err != nil || got != want {
			t.Errorf("%q is %q, %v", text, got, err)
		}
	}
	for _, text := range []string{"${A", "${}", "${A:?no}", "${A%x}", "${1}"} {
		if got, err := expand(text, look); !errdefs.IsInvalidArgument(err) {
			t.Errorf("%q is %q, %v", text, got, err)
		}
	}
}

// TestPlaces: where steps lead to.
func TestPlaces(t *testing.T) {
	at := place{User: "user"}
	for _, c := range []struct {
		step      Step
		user, dir string
	}{
		{Step{Type: Workdir, Args: []string{"app"}}, "user", "/home/user/app"},
		{Step{Type: Workdir, Args: []string{"/srv"}}, "user", "/srv"},
		{Step{Type: Workdir, Args: []string{"$X/../y"}}, "user", "/srv/y"},
		{Step{Type: User, Args: []string{"root"}}, "root", "/srv/y"},
		{Step{Type: Workdir, Args: []string{"~/z"}}, "root", "/root/z"},
	} {
		var err error
		if at, err = at.after(c.step, map[string]string{"X": "x"}); err != nil || at.User != c.user || at.Workdir != c.dir {
			t.Errorf("%s leads to %+v, %v", c.step, at, err)
		}
	}
	first, err := at.after(Step{Type: Env, Args: []string{"A", "a", "B", "$A"}}, nil)
	if err != nil || first.Env["B"] != "" {
		t.Errorf("%+v, %v", first, err)
	}
	second, err := first.after(Step{Type: Env, Args: []string{"B", "$A"}}, nil)
	if err != nil || second.Env["B"] != "a" || first.Env["B"] != "" {
		t.Errorf("%+v after %+v, %v", second, first, err)
	}
}

// TestSteps: what is no step is refused, and says why.
func TestSteps(t *testing.T) {
	ok := strings.Repeat("a", 64)
	for want, s := range map[string]Step{
		"there is no step":      {Type: "ADD"},
		"takes a command line":  {Type: Run},
		"can't be done as":      {Type: Run, Args: []string{"true", "a b"}},
		"zero byte":             {Type: Run, Args: []string{"a\x00"}},
		"in turns":              {Type: Env, Args: []string{"A"}},
		"no name of a variable": {Type: Env, Args: []string{"A=B", "c"}},
		"can't be put in":       {Type: Env, Args: []string{"A", "${B:=c}"}},
		"takes a directory":     {Type: Workdir, Args: []string{""}},
		"the name of a user":    {Type: User, Args: []string{"1000:1000"}},
		"takes what is copied":  {Type: Copy, Args: []string{"a"}, Files: ok},
		`can't copy "../a"`:     {Type: Copy, Args: []string{"../a", "b"}, Files: ok},
		`can't copy "/a"`:       {Type: Copy, Args: []string{"/a", "b"}, Files: ok},
		"octal digits":          {Type: Copy, Args: []string{"a", "b", "", "rwx"}, Files: ok},
		"must be a SHA-256 sum": {Type: Copy, Args: []string{"a", "b"}, Files: "../../x"},
		"a value has more than": {Type: Env, Args: []string{"A", strings.Repeat("$L", 100)}},
		"a template may have":   {Type: Env, Args: []string{"A", "$L", "B", "$L", "C", "$L", "D", "$L", "E", "$L", "F", "$L", "G", "$L", "H", "$L", "I", "$L", "J", "$L", "K", "$L"}},
	} {
		if _, err := (place{}).after(s, map[string]string{"L": strings.Repeat("x", 100_000)}); !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
}

// TestEnvBound: variables that are put in again and again take no more of memory than is bounded, step for step; many usual ones may be.
func TestEnvBound(t *testing.T) {
	many := Recipe{Steps: []Step{{Type: Env, Args: []string{"A", strings.Repeat("a", 1000)}}}}
	var usual Recipe
	for i := range maxSteps {
		if i > 0 { // V0 to V7, again and again
			many.Steps = append(many.Steps, Step{Type: Env, Args: []string{fmt.Sprint("V", i%8), strings.Repeat("$A", 100)}})
		}
		usual.Steps = append(usual.Steps, Step{Type: Run, Args: []string{"true"}})
	}
	for i := range 300 {
		usual.Steps[i*3] = Step{Type: Env, Args: []string{fmt.Sprint("V", i), "$PATH:/opt/bin"}}
	}
	if err := usual.CheckSteps(); err != nil {
		t.Error(err)
	}
	var f *Failure
	if err := many.CheckSteps(); !errors.As(err, &f) || !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), "lead to more than 16 MiB") {
		t.Errorf("%v", err)
	}
}
