package main

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/cubesandbox/cube/orchestrator/db"
)

// claims measures creates that find a member of the pool, one at a time, each when the pool has been filled again.
func (u *user) claims(n int) error {
	d, err := db.Open(u.ctx, u.Config.DatabaseFile())
	if err != nil {
		return err
	}
	defer d.Close()
	for range 2 { // that is how many members are wanted then
		sb, _, err := u.create()
		if err != nil {
			return err
		}
		if err := u.kill(sb); err != nil {
			return err
		}
	}
	load, _ := os.ReadFile("/proc/loadavg")
	var posts, all sample
	missed := 0
	for range n {
		kept, err := u.filled(d, 2)
		if err != nil {
			return err
		}
		sb, post, took, err := u.timed()
		if err != nil {
			return err
		}
		if kept[sb.ID] {
			posts, all = append(posts, post), append(all, took)
		} else {
			missed++
		}
		if err := u.kill(sb); err != nil {
			return err
		}
	}
	if len(all) == 0 {
		return errors.New("no create found a member of the pool")
	}
	fmt.Printf("\n## E2B's API: create from the warm pool\n\nThe same template; the pool has two machines before each create.\n\n"+
		"| | n | p50 ms | p95 ms |\n| --- | --- | --- | --- |\n| 201 | %d | %.0f | %.0f |\n| envd has answered by the proxy | %d | %.0f | %.0f |\n\n%d others found none. Load before: %s.\n",
		len(posts), ms(posts.quantile(0.5)), ms(posts.quantile(0.95)), len(all), ms(all.quantile(0.5)), ms(all.quantile(0.95)), missed, strings.Fields(string(load))[0])
	return nil
}

// filled waits until the pool has n members that can be claimed, and returns their ids.
func (u *user) filled(d *db.DB, n int) (map[string]bool, error) {
	for end := time.Now().Add(u.Config.Timeout(time.Minute)); ; time.Sleep(50 * time.Millisecond) {
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
			return nil, fmt.Errorf("the pool has %d members, not %d", len(ids), n)
		}
	}
}
