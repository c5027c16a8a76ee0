# cmake -DPAGE=folder -DOUTPUT=file.html [-DMARKDOWN_IT=f -DDOMPURIFY=f -DHIGHLIGHT=folder] -P NfpPage.cmake: puts the
# page's parts, and the libraries that it renders answers with where there are any, into one file.
file(READ "${PAGE}/index.html" html)

function(place name)
  set(text "")
  foreach(file IN LISTS ARGN)
    file(READ "${file}" part)
    string(APPEND text "${part}\n")
  endforeach()
  string(REPLACE "@${name}@" "${text}" html "${html}")
  set(html "${html}" PARENT_SCOPE)
endfunction()

# A library with its package's licences, which must go where it goes. "</script" would end the script in the middle of a
# string; with the backslash the string is the same.
function(library file package before after)
  file(READ "${file}" part)
  string(REPLACE "</script" "<\\/script" part "${part}")
  # Debian 12's 2.4.1+dfsg+~2.4.0-2+deb12u1 asks for a variable that is not there where the original asks for FORCE_BODY,
  # an option that the page does not set: all HTML would fail.
  string(REGEX REPLACE "\\(shadowNode\\.__depth>=[A-Za-z]+\\|\\|[A-Za-z]+\\(shadowNode\\.__depth\\)\\)&&" "false&&" part "${part}")
  set(licences "")
  if(EXISTS "/usr/share/doc/${package}/copyright")
    file(READ "/usr/share/doc/${package}/copyright" licences)
    string(REPLACE "*/" "* /" licences "${licences}")
    string(REPLACE "</script" "<\\/script" licences "${licences}")
  endif()
  set(libraries "${libraries}\n/* ${package}\n${licences}*/\n${before}${part}${after}\n" PARENT_SCOPE)
endfunction()

set(libraries "")
if(MARKDOWN_IT)
  library("${MARKDOWN_IT}" libjs-markdown-it "" "")
  library("${DOMPURIFY}" node-dompurify "" "")
  # CommonJS modules, which get a `module` each.
  library("${HIGHLIGHT}/highlight.js" node-highlight.js "(function(){var module={};\n" "\n})();")
  foreach(language bash cmake cpp cs css diff dockerfile go ini java javascript json julia kotlin lua makefile markdown
      objectivec perl php python r ruby rust scala shell sql swift typescript xml yaml)
    if(NOT EXISTS "${HIGHLIGHT}/languages/${language}.js")
      continue()
    endif()
    file(READ "${HIGHLIGHT}/languages/${language}.js" part)
    string(REPLACE "</script" "<\\/script" part "${part}")
    string(APPEND libraries "hljs.registerLanguage(\"${language}\",(function(){var module={};\n${part}\nreturn module.exports;})());\n")
  endforeach()
endif()

place(STYLE "${PAGE}/style.css")
place(SCRIPTS "${PAGE}/markdown.js" "${PAGE}/store.js" "${PAGE}/answer.js" "${PAGE}/chat.js" "${PAGE}/load.js" "${PAGE}/charts.js")
string(REPLACE "@LIBRARIES@" "${libraries}" html "${html}")
file(WRITE "${OUTPUT}" "${html}")
