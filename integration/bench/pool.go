package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/cubesandbox/cube/orchestrator/db"
)

// held is how many machines the warm pool holds.
const held = 4

// pools measures creates with and without the warm pool: on two stacks that are there at the same time, in turns, so that what else
// the host does is the same for both.
func pools(ctx context.Context, root string, n int) error {
	pooled := fmt.Sprintf("[pool]\nmax_memory = \"2GiB\"\nmax_per_template = %d", held)
	return onStack(ctx, root, func(without *user) error {
		return onStack(ctx, root, func(with *user) error { return contrast(with, without, n) }, pooled)
	})
}

// side is one of the two.
type side struct {
	*user
	name        string
	posts, all  sample // until the API, and until envd by the proxy has answered
	hits, tries int    // of those that could be of the pool
}

func contrast(with, without *user, n int) error {
	d, err := db.Open(with.ctx, with.Config.DatabaseFile())
	if err != nil {
		return err
	}
	defer d.Close()
	if _, _, err := without.create(); err != nil { // the copy of the template's memory stays with it, as with a member of the pool
		return err
	}
	for range held { // so many are wanted then
		sb, _, err := with.create()
		if err == nil {
			err = with.kill(sb)
		}
		if err != nil {
			return err
		}
	}
	fmt.Printf("\n## E2B's API: creates with and without the warm pool\n\nA template of 2 vCPUs and 512 MiB; two stacks, in turns; the pool has %d machines before each row's turn.\n\n"+
		"| at once | | n | 201: p50 ms | p95 ms | envd has answered by the proxy: p50 ms | p95 ms | load before |\n| --- | --- | --- | --- | --- | --- | --- | --- |\n", held)
	for _, at := range []int{1, held} {
		if err := turns(d, with, without, at, max(1, n/at)); err != nil {
			return err
		}
	}
	return sustained(with, without, 2*n)
}

// turns measures so many creates at once on both, so often.
func turns(d *db.DB, with, without *user, at, rounds int) error {
	load := loadNow()
	sides := []*side{{user: with, name: "with the pool"}, {user: without, name: "without"}}
	for range rounds {
		for _, s := range sides {
			kept, err := with.filled(d, held) // for both: none is made beside what is measured
			if err != nil {
				return err
			}
			made, err := s.atOnce(at)
			if err != nil {
				return err
			}
			for _, sb := range made {
				s.tries++
				if kept[sb.ID] {
					s.hits++
				}
			}
			if err := s.kill(made...); err != nil {
				return err
			}
		}
	}
	for _, s := range sides {
		name := s.name
		if s.user == with {
			name += fmt.Sprintf(", %d of %d of it", s.hits, s.tries)
		}
		fmt.Printf("| %d | %s | %d | %.0f | %.0f | %.0f | %.0f | %s |\n", at, name, len(s.all), ms(s.posts.quantile(0.5)), ms(s.posts.quantile(0.95)), ms(s.all.quantile(0.5)), ms(s.all.quantile(0.95)), load)
	}
	a, b := sides[0], sides[1]
	fmt.Printf("| %d | without to with, of the medians | | %.1f | | %.1f | | |\n", at, ms(b.posts.quantile(0.5))/ms(a.posts.quantile(0.5)), ms(b.all.quantile(0.5))/ms(a.all.quantile(0.5)))
	return nil
}

// atOnce makes sandboxes at once.
func (s *side) atOnce(n int) ([]sandbox, error) {
	made, posts, all := make([]sandbox, n), make(sample, n), make(sample, n)
	var g errgroup.Group
	for i := range n {
		g.Go(func() (err error) {
			made[i], posts[i], all[i], err = s.timed()
			return err
		})
	}
	err := g.Wait()
	s.posts, s.all = append(s.posts, posts...), append(s.all, all...)
	return made, err
}

// sustained measures how many sandboxes are made, used and removed in a second, again and again.
func sustained(with, without *user, n int) error {
	fmt.Printf("\n### Creates in a row, each until envd has answered, and removed\n\n| at once | | n | creates/s | create p50 ms | p95 ms | kill p50 ms | load before |\n| --- | --- | --- | --- | --- | --- | --- | --- |\n")
	for _, at := range []int{1, 4} {
		for _, s := range []*side{{user: with, name: "with the pool"}, {user: without, name: "without"}} {
			load := loadNow()
			before, err := s.metric(hits)
			if err != nil {
				return err
			}
			creates, kills, took, err := s.inRow(at, n)
			if err != nil {
				return err
			}
			after, err := s.metric(hits)
			if err != nil {
				return err
			}
			name := s.name
			if s.user == with {
				name += fmt.Sprintf(", %.0f of %d of it", after-before, n)
			}
			fmt.Printf("| %d | %s | %d | %.2f | %.0f | %.0f | %.0f | %s |\n", at, name, n, float64(n)/took.Seconds(), ms(creates.quantile(0.5)), ms(creates.quantile(0.95)), ms(kills.quantile(0.5)), load)
		}
	}
	return nil
}

// hits counts creates that have found a member of the pool.
const hits = `cube_pool_creates_total{result="hit"}`

// inRow makes n sandboxes, so many at a time, each of which is removed before the next one is made.
func (s *side) inRow(at, n int) (creates, kills sample, took time.Duration, err error) {
	creates, kills = make(sample, n), make(sample, n)
	var g errgroup.Group
	g.SetLimit(at)
	began := time.Now()
	for i := range n {
		g.Go(func() error {
			sb, took, err := s.create()
			if err != nil {
				return err
			}
			creates[i] = took
			gone := time.Now()
			err = s.kill(sb)
			kills[i] = time.Since(gone)
			return err
		})
	}
	err = g.Wait()
	return creates, kills, time.Since(began), err
}

// filled waits until the pool has n members that can be claimed, and returns their ids.
func (u *user) filled(d *db.DB, n int) (map[string]bool, error) {
	for end := time.Now().Add(u.Config.Timeout(2 * time.Minute)); ; time.Sleep(50 * time.Millisecond) {
		all, err := d.Members(u.ctx)
		if err != nil {
			return nil, err
		}
		ids := map[string]bool{}
		for _, m := range all {
			if m.Ready {
				ids[m.ID] = true
			}
		}
		if len(ids) >= n {
			return ids, nil
		}
		if time.Now().After(end) {
			return nil, errors.Join(fmt.Errorf("the pool has %d members, not %d", len(ids), n), u.ctx.Err())
		}
	}
}

// loadNow is the host's load average of the last minute.
func loadNow() string {
	load, _ := os.ReadFile("/proc/loadavg")
	return strings.Fields(string(load))[0]
}
