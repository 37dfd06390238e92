// Prints how Go's net/http parses a request.
package main

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"strings"
)

// The field of a JSON body or of a form, whatever its content type.
func email(request *http.Request) string {
	body, _ := io.ReadAll(request.Body)
	var fields struct {
		Email string `json:"email"`
	}
	if json.Unmarshal(body, &fields) == nil && fields.Email != "" {
		return fields.Email
	}
	request.Body = io.NopCloser(bytes.NewReader(body))
	return request.PostFormValue("email")
}

func say(route string) http.HandlerFunc {
	return func(response http.ResponseWriter, request *http.Request) {
		said := map[string]any{
			"route": route, "path": request.URL.Path, "host": request.Host,
			"key": nil, "authorization": nil, "session": nil, "user": nil, "email": nil,
		}
		for name, value := range map[string]string{
			"key":           request.Header.Get("X-Api-Key"),
			"authorization": request.Header.Get("Authorization"),
			"user":          request.URL.Query().Get("user"),
			"email":         email(request),
		} {
			if value != "" {
				said[name] = value
			}
		}
		if cookie, err := request.Cookie("sid"); err == nil {
			said["session"] = cookie.Value
		}
		json.NewEncoder(response).Encode(said)
	}
}

// Routes by the path after a prefix, as programs did before ServeMux had path wildcards.
func below(prefix string, routes map[string]string) http.HandlerFunc {
	return func(response http.ResponseWriter, request *http.Request) {
		segments := strings.Split(strings.TrimPrefix(request.URL.Path, prefix), "/")
		segments[0] = "{id}"
		route, found := routes[strings.Join(segments, "/")]
		if !found {
			http.NotFound(response, request)
			return
		}
		say(route)(response, request)
	}
}

func main() {
	http.HandleFunc("/login", say("/login"))
	http.HandleFunc("/api/login", say("/api/login"))
	http.HandleFunc("/files/", say("/files/*"))
	http.HandleFunc("/users/", below("/users/", map[string]string{
		"{id}": "/users/{id}", "{id}/export": "/users/{id}/export",
	}))
	http.HandleFunc("/projects/", below("/projects/", map[string]string{"{id}": "/projects/{id}"}))
	panic(http.ListenAndServe("127.0.0.1:"+os.Getenv("PORT"), nil))
}
