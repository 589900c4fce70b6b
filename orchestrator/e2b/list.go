package e2b

import (
	"slices"
	"strconv"

	"github.com/cubesandbox/cube/orchestrator/lifecycle"
)

// maxPage is the most elements that a page of a list has, and as many as it has if a client doesn't say.
const maxPage = 100

const (
	nextHeader    = "X-Next-Token"
	runningHeader = "X-Total-Running"
)

// list is the list of the second generation, a page at a time.
func (s *Server) list(c *call) (answer, error) {
	f, l, err := readFilter(c)
	if err != nil {
		return answer{}, err
	}
	page, next, running, err := s.engine.List(c.ctx, c.team, f)
	if err != nil {
		return answer{}, err
	}
	a := ok(listedAll([]listedBody{}, page)).with(nextHeader, l.cursor(next))
	if slices.Contains(f.States, lifecycle.Running) {
		a = a.with(runningHeader, strconv.Itoa(running))
	}
	return a, nil
}

// readFilter reads which sandboxes are asked for, and which list that makes.
func readFilter(c *call) (lifecycle.Filter, list, error) {
	q := c.query
	f := lifecycle.Filter{
		States:       states(q),
		StartedAfter: q.time("startedAfter"),
		Ascending:    q.choice("order", "desc", "asc") == "asc",
		Limit:        int(q.number("limit", maxPage, 1, maxPage)),
	}
	var err error
	f.Metadata, err = parseMetadata(q.text("metadata"))
	c.note(err)
	if t := q.text("template"); t != "" {
		ref, err := parseRef("template", t)
		if ref.Tag != "" {
			err = invalid("template: %s has a tag, and a list is of all tags", quote(t))
		}
		c.note(err)
		f.Template = ref.String()
	}
	of := f
	of.Limit = 0
	l := listOf("sandboxes", of)
	f.After, err = l.place(q.text("nextToken"))
	c.note(err)
	return f, l, c.checked()
}

// states are those that a list is to have: both, if nothing is said of them.
func states(q *query) []lifecycle.State {
	var all []lifecycle.State
	for _, s := range q.list("state") {
		state := lifecycle.State(s)
		if state != lifecycle.Running && state != lifecycle.Paused {
			q.fail("state", "%s isn't one: running and paused are", quote(s))
		}
		if !slices.Contains(all, state) {
			all = append(all, state)
		}
	}
	if len(all) == 0 {
		return []lifecycle.State{lifecycle.Paused, lifecycle.Running}
	}
	slices.Sort(all)
	return all
}

// listV1 is all sandboxes that run, at once.
func (s *Server) listV1(c *call) (answer, error) {
	metadata, err := parseMetadata(c.query.text("metadata"))
	c.note(err)
	if err := c.checked(); err != nil {
		return answer{}, err
	}
	f := lifecycle.Filter{States: []lifecycle.State{lifecycle.Running}, Metadata: metadata, Limit: maxPage}
	all := []listedBody{}
	for {
		page, next, _, err := s.engine.List(c.ctx, c.team, f)
		if err != nil {
			return answer{}, err
		}
		all = listedAll(all, page)
		if next == (lifecycle.Cursor{}) {
			return ok(all), nil
		}
		f.After = next
	}
}

func listedAll(all []listedBody, page []lifecycle.Sandbox) []listedBody {
	all = slices.Grow(all, len(page))
	for _, sb := range page {
		all = append(all, listed(sb))
	}
	return all
}
