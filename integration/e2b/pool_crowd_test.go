package e2b

import (
	"fmt"
	"sync"
	"testing"
	"time"
)

// TestPoolCrowd has many sandboxes created, more at once than there are members of the pool, and killed one by one: whichever way one
// was made, it is what was asked for and nobody else's, and nothing is left.
func TestPoolCrowd(t *testing.T) {
	n, size, atOnce := 8, 2, 4
	if long() {
		n, size, atOnce = 200, 4, 8
	}
	p := newPooled(t, size)
	count := func(result string) float64 { return p.metric("cube_pool_creates_total", result) }
	hits, misses := count("hit"), count("miss")
	began := time.Now()
	turns := make(chan struct{}, atOnce)
	var all sync.WaitGroup
	for i := range n {
		turns <- struct{}{}
		all.Go(func() {
			defer func() { <-turns }()
			sb := p.gets(fmt.Sprint("number ", i))
			if sb.ID == "" {
				return
			}
			if code, message, err := p.call("DELETE", "/sandboxes/"+sb.ID, nil, nil); err != nil || code != 204 {
				t.Errorf("delete %s: %d %s, %v", sb.ID, code, message, err)
			}
		})
	}
	all.Wait()
	took := time.Since(began)
	p.whole()
	hits, misses = count("hit")-hits, count("miss")-misses
	t.Logf("%d creates, %d at once, in %v: %.0f of members and %.0f not, %.0f members were of no use", n, atOnce, took.Round(time.Millisecond), hits, misses, count("lost"))
	if hits == 0 || misses == 0 || hits+misses < float64(n) { // what is tried again counts again
		t.Errorf("%.0f creates are of the pool and %.0f not", hits, misses)
	}
}
