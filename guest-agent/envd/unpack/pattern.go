package unpack

import (
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// pattern is what a COPY copies: a path, or one with *, ? and [] in its parts, or ** for any number of them.
type pattern struct {
	parts []string
	many  bool // it may be of several things
}

func newPattern(from string) (*pattern, error) {
	clean := path.Clean(from)
	if !filepath.IsLocal(clean) {
		return nil, invalid("%.200q is nowhere below the directory of the template", from)
	}
	p := &pattern{many: strings.ContainsAny(clean, "*?[")}
	if clean != "." {
		p.parts = strings.Split(clean, "/")
	}
	for _, part := range p.parts {
		if _, err := path.Match(part, ""); err != nil {
			return nil, invalid("%.200q is no pattern: %v", from, err)
		}
	}
	return p, nil
}

// top is what of a clean path is what the pattern stands for: the path itself or, the shortest, what is above it.
func (p *pattern) top(name string) (string, bool) {
	if len(p.parts) == 0 {
		return ".", true
	}
	parts := strings.Split(name, "/")
	for n := 1; n <= len(parts); n++ {
		if p.match(p.parts, parts[:n]) {
			return path.Join(parts[:n]...), true
		}
	}
	return "", false
}

func (p *pattern) match(want, have []string) bool {
	if !p.many {
		return slices.Equal(want, have)
	}
	// reached[i]: what comes before want[i] stands for what of have was looked at.
	reached := make([]bool, len(want)+1)
	reached[0] = true
	skip := func() {
		for i, part := range want {
			if part == "**" && reached[i] {
				reached[i+1] = true
			}
		}
	}
	skip()
	for _, h := range have {
		next := make([]bool, len(want)+1)
		for i, part := range want {
			switch ok, _ := path.Match(part, h); { // its form was looked at
			case !reached[i]:
			case part == "**":
				next[i] = true
			case ok:
				next[i+1] = true
			}
		}
		reached = next
		skip()
	}
	return reached[len(want)]
}
